"""Folders of images: what a scan finds, what each format becomes, batches that do not depend on
ranks and threads.
"""

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import launch
from runs import (
    assert_bitwise,
    compose,
    newest_checkpoint,
    read_summary,
    train_all,
    train_on,
    world_of,
)
from test_decoding import gradient, png
from test_loader import CPU
from torch import Tensor

from ddp_trainer.config.data import DigitsConfig, ImageFolderConfig
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.images import FileAugmentConfig
from ddp_trainer.data.augmentation import Augmentation, Normalize
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import Datasets, ImageTensors, num_samples
from ddp_trainer.data.images.image_files import ImageFiles
from ddp_trainer.data.loaders import EvaluationLoader, TrainLoader
from ddp_trainer.data.readers import NO_LABEL, SampleReader
from ddp_trainer.data.sampler import GlobalBatchSampler

NORMALIZE = Normalize([0.5] * 3, [0.25] * 3, device=CPU, memory_format=torch.contiguous_format)


def write_folder(root: Path, *, splits: tuple[str, ...] = ("train", "val"), count: int = 6) -> Path:
    """Write `count` images of each of two classes into each split; "" is the folder itself."""
    for split in splits:
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = np.roll(gradient(20 + number, 30 - number), label * 7, axis=1)
                Image.fromarray(image).save(folder / f"{number}.png")
    return root


def build(root: Path, **options: Any) -> Datasets:
    return build_datasets(ImageFolderConfig(root=str(root), image_size=16, **options))


def names(split: Any) -> list[str]:
    assert isinstance(split, ImageFiles)
    return [os.path.relpath(split.path(index), split.files.root) for index in range(len(split))]


# --- the scan -----------------------------------------------------------------------------------


def test_classes_and_files_come_in_a_fixed_order(tmp_path: Path) -> None:
    datasets = build(write_folder(tmp_path, count=2))
    assert datasets.class_names == ["cat", "dog"]
    assert (
        names(datasets.train)
        == names(datasets.eval)
        == ["cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png"]
    )
    assert datasets.train.labels.tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]
    assert datasets.image_shape == (3, 16, 16)


def test_odd_names_and_folders_are_found_or_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, count=1) / "train/cat"
    (folder / "0.png").rename(folder / "ä\nb.PNG")
    (folder / "deep/er").mkdir(parents=True)
    Image.fromarray(gradient()).save(folder / "deep/er/x.JPeG", "jpeg")
    Image.fromarray(gradient()).save(os.fsencode(folder) + b"/\xff.png", "png")
    (folder / "deep/loop").symlink_to(folder)
    (folder / "folder.png").mkdir()
    (folder / "nothing.png").symlink_to("missing")
    (folder / "notes.txt").write_text("text")
    (tmp_path / "train/.hidden").mkdir()
    datasets = build(tmp_path)
    assert names(datasets.train) == [
        "cat/deep/er/x.JPeG",
        "cat/ä\nb.PNG",
        os.fsdecode(b"cat/\xff.png"),
        "dog/0.png",
    ]
    assert all(datasets.train[index][0].shape == (3, 16, 16) for index in range(4))  # type: ignore[index]


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


WRONG: dict[str, Callable[[Path], Any]] = {
    "data.root={root} must be a folder of images, and there is no such folder": (
        lambda root: (root / "train").parent.rename(root / "../elsewhere")
    ),
    "data.root={root} has no folder train": lambda root: (root / "train").rename(root / "training"),
    "data.root={root} has none of the folders val, validation, valid, test: make one": (
        lambda root: (root / "val").rename(root / "evaluation")
    ),
    "{root}/train/dog has no image: fill or remove the folder": lambda root: empty(
        root / "train/dog"
    ),
    "{root}/val has the class 'fox', which the training images do not have: remove it": (
        lambda root: (root / "val/fox").mkdir()
    ),
    "{root}/train must have at least 2 folders, one for each class, and has 1": (
        lambda root: (root / "train/dog").rename(root / "x")
    ),
    "{root}/val has no images: add files that end in ": lambda root: [
        empty(root / "val" / name) for name in ("cat", "dog")
    ],
}


@pytest.mark.parametrize("expected", WRONG)
def test_a_folder_that_does_not_fit_is_one_error(expected: str, tmp_path: Path) -> None:
    WRONG[expected](write_folder(tmp_path / "root"))
    with pytest.raises(ConfigError) as error:
        build(tmp_path / "root")
    assert str(error.value).startswith(expected.format(root=tmp_path / "root"))
    assert "\n" not in str(error.value)


def test_a_root_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"^data\.root is missing"):
        build_datasets(ImageFolderConfig())


def test_one_folder_is_split_alike_in_each_class(tmp_path: Path) -> None:
    datasets = build(write_folder(tmp_path, splits=("",), count=10), validation_fraction=0.3)
    assert (num_samples(datasets.train), num_samples(datasets.eval)) == (14, 6)
    labels = [datasets.eval[index][1] for index in range(6)]  # type: ignore[index]
    assert sorted(labels) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("fraction", "held_out"), [(0.2, 8), (0.5, 20)])
def test_of_small_classes_the_fraction_holds_over_all_and_none_is_held_out_whole(
    fraction: float, held_out: int, tmp_path: Path
) -> None:
    classes = {"a single image": 1} | {f"class {number:02}": 2 for number in range(20)}
    for name, count in classes.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / name / f"{number}.png")
    datasets = build(tmp_path, validation_fraction=fraction)
    assert num_samples(datasets.eval) == held_out
    trained = {datasets.train[index][1] for index in range(num_samples(datasets.train))}  # type: ignore[index]
    assert len(trained) == len(classes)


def test_the_fingerprint_changes_with_names_sizes_and_the_size_of_images(tmp_path: Path) -> None:
    root = write_folder(tmp_path)
    first = build(root).fingerprint
    assert build(root).fingerprint == first
    assert build_datasets(ImageFolderConfig(root=str(root), image_size=17)).fingerprint != first
    (root / "train/cat/0.png").rename(root / "train/cat/00.png")
    renamed = build(root).fingerprint
    with open(root / "val/dog/1.png", "ab") as file:
        file.write(b"x")
    assert len({first, renamed, build(root).fingerprint}) == 3


# --- bad images -----------------------------------------------------------------------------------


def spoil(root: Path) -> list[str]:
    """Make three training images and one for evaluation bad, and return their paths."""
    (root / "train/dog/2.png").write_bytes(b"")
    (root / "train/cat/0.png").write_bytes(b"text")
    (root / "train/cat/1.png").unlink()
    (root / "train/cat/1.png").symlink_to("0.png")
    (root / "val/dog/3.png").write_bytes(png(gradient())[:-60])
    return sorted(
        str(root / name)
        for name in ("train/dog/2.png", "train/cat/0.png", "train/cat/1.png", "val/dog/3.png")
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_image_counts_as_none_on_any_rank(
    world_size: int, num_workers: int, tmp_path: Path
) -> None:
    bad = spoil(write_folder(tmp_path))
    datasets = build(tmp_path)
    good = whole_batches(tmp_path, 1)
    found = []
    for rank in range(world_size):
        loader = train_loader(datasets, rank=rank, world_size=world_size, num_workers=num_workers)
        loader.sampler.set_epoch(1)
        for number, batch in enumerate(loader):
            paths = map(datasets.train.path, batch.ids.tolist())  # type: ignore[union-attr]
            is_bad = torch.tensor([path in bad for path in paths])
            assert ((batch.labels == NO_LABEL) == is_bad).all()
            assert torch.equal(batch.images, good[number][rank::world_size])
        found += [name for name, _ in loader.reader.bad]  # type: ignore[union-attr]
    assert set(found) <= set(bad)


# --- batches ------------------------------------------------------------------------------------


def train_loader(
    datasets: Datasets, *, rank: int, world_size: int, num_workers: int
) -> TrainLoader:
    files = datasets.train
    assert isinstance(files, ImageFiles)
    reader = SampleReader(files, image_shape=(3, 16, 16), num_classes=2, num_workers=num_workers)
    sampler = GlobalBatchSampler(
        len(files), global_batch_size=5, world_size=world_size, rank=rank, seed=3
    )
    augmentation = Augmentation(FileAugmentConfig(random_hflip=True), height=16, width=16, seed=3)
    return TrainLoader(
        reader,
        sampler=sampler,
        augmentation=augmentation,
        normalize=NORMALIZE,
        device=CPU,
        num_classes=2,
    )


@functools.cache
def whole_batches(root: Path, epoch: int) -> list[Tensor]:
    loader = train_loader(build(root), rank=0, world_size=1, num_workers=1)
    loader.sampler.set_epoch(epoch)
    return [batch.images for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_depend_neither_on_ranks_nor_on_threads(
    world_size: int, num_workers: int, tmp_path: Path
) -> None:
    datasets = build(write_folder(tmp_path))
    whole = whole_batches(tmp_path, 1)
    assert len(whole) == 2
    for rank in range(world_size):
        loader = train_loader(datasets, rank=rank, world_size=world_size, num_workers=num_workers)
        loader.sampler.set_epoch(1, step=1)  # a resume at the second batch
        [share] = [batch.images for batch in loader]
        assert torch.equal(share, whole[1][rank::world_size])
    assert not torch.equal(whole[0], whole_batches(tmp_path, 2)[0])


def test_an_evaluation_sees_the_centers(tmp_path: Path) -> None:
    datasets = build(write_folder(tmp_path))
    reader = SampleReader(datasets.eval, image_shape=(3, 16, 16), num_classes=2, num_workers=2)  # type: ignore[arg-type]
    loader = EvaluationLoader(reader, NORMALIZE, world_of(0, 1), batch_size=7)
    images = torch.cat([batch.images for batch in loader])
    centers = torch.stack([datasets.eval[index][0] for index in range(12)])  # type: ignore[index]
    assert torch.equal(images, NORMALIZE(centers))


# --- whole runs ---------------------------------------------------------------------------------


def write_digits(root: Path) -> Path:
    """Write the handwritten digits as files of different sizes and formats."""
    digits = build_datasets(DigitsConfig())
    for name, split in (("train", digits.train), ("val", digits.eval)):
        assert isinstance(split, ImageTensors)
        for number, (image, label) in enumerate(
            zip(split.images, split.labels.tolist(), strict=True)
        ):
            folder = root / name / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            size = (16 + number % 5, 18 + number % 3)
            picture = Image.fromarray(image[0].numpy()).resize(size, Image.Resampling.BICUBIC)
            picture.convert("RGB").save(folder / f"{number}.{'png' if number % 3 else 'jpg'}")
    return root


def test_a_folder_is_learned_alike_on_any_number_of_ranks_and_after_a_stop(tmp_path: Path) -> None:
    root = write_digits(tmp_path / "digits")
    common = (
        "data=imagefolder",
        f"data.root={root}",
        "data.image_size=12",
        "data.augment.random_hflip=false",
        "data.augment.random_resized_crop=0.7",
        "model=lenet",
        "precision=fp32",
        "global_batch_size=32",
        "optimizer.lr=0.1",
        "epochs=3",
        f"output_dir={tmp_path}",
    )
    train_all(
        2,
        [(*common, "name=whole"), (*common, "name=parts", "max_steps=60"), (*common, "name=parts")],
    )
    train_on(1, *common, "name=one", "max_steps=6")
    train_on(3, *common, "name=three", "max_steps=6")
    whole, parts, one, three = (
        newest_checkpoint(tmp_path / name) for name in ("whole", "parts", "one", "three")
    )
    assert_bitwise(whole["model"], parts["model"])
    assert_bitwise(one["progress"]["digest"], three["progress"]["digest"])
    torch.testing.assert_close(one["model"], three["model"])
    assert read_summary(tmp_path / "whole")["eval/top1"] > 0.8
    assert whole["class_names"] == [f"digit {digit}" for digit in range(10)]
    assert compose("data=imagefolder").data.name == "imagefolder"


BAD_RUN = (
    "data=imagefolder",
    "data.image_size=12",
    "model=lenet",
    "precision=fp32",
    "global_batch_size=6",
    "epochs=2",
)


def test_bad_images_end_a_run_before_its_first_save_and_can_be_left_out(tmp_path: Path) -> None:
    bad = spoil(write_folder(tmp_path / "root", count=9))
    words = (*BAD_RUN, f"data.root={tmp_path}/root", f"output_dir={tmp_path}")
    done = launch(*words, "name=run", "checkpoint.every_steps=1", ranks=2)
    assert not list((tmp_path / "run").glob("checkpoints/*"))  # in the first batch is one of them
    assert done.code == 1, done.output  # torchrun's, whatever that of its ranks is
    assert "exitcode  : 2" in done.output
    [line] = [line for line in done.output.splitlines() if " cannot be read: " in line]
    assert re.search(
        r"train/.*\.png cannot be read: .*; set data\.on_bad_image=skip to leave out bad", line
    )
    train_on(2, *words, "name=run", "data.on_bad_image=skip")
    listed = [
        json.loads(line) for line in (tmp_path / "run/bad_images.jsonl").read_text().splitlines()
    ]
    assert sorted(line["path"] for line in listed) == bad
    assert all(line["reason"] for line in listed)
    assert "left out " in (tmp_path / "run/train.log").read_text()
    (tmp_path / "1").mkdir()  # a damaged file
    lines = [b'{"path": 1, "reason": 2}', b"\xff", b"[]", b"7", b"{}", b"[" * 9999]
    (tmp_path / "1/bad_images.jsonl").write_bytes(b"\n".join(lines))
    for ranks in (1, 3):
        train_on(ranks, *words, f"name={ranks}", "data.on_bad_image=skip")
        assert (tmp_path / f"{ranks}/bad_images.jsonl").read_text() == (
            tmp_path / "run/bad_images.jsonl"
        ).read_text()
        assert (
            read_summary(tmp_path / str(ranks))["eval/count"]
            == read_summary(tmp_path / "run")["eval/count"]
            == 17
        )
        torch.testing.assert_close(
            newest_checkpoint(tmp_path / str(ranks))["model"],
            newest_checkpoint(tmp_path / "run")["model"],
            rtol=1e-4,
            atol=1e-5,
        )


def test_a_cache_knows_its_bad_images(tmp_path: Path) -> None:
    bad = spoil(write_folder(tmp_path / "root", count=9))
    words = (
        *BAD_RUN,
        f"data.root={tmp_path}/root",
        f"output_dir={tmp_path}",
        "data.cache=uint8",
        f"data.cache_dir={tmp_path}/cache",
        "data.on_bad_image=skip",
    )
    for name in ("first", "second"):
        train_on(2, *words, f"name={name}")
        listed = [
            json.loads(line)
            for line in (tmp_path / name / "bad_images.jsonl").read_text().splitlines()
        ]
        assert sorted(line["path"] for line in listed) == bad
    assert_bitwise(
        newest_checkpoint(tmp_path / "first")["model"],
        newest_checkpoint(tmp_path / "second")["model"],
    )


def test_a_file_that_changes_in_training_ends_the_run(tmp_path: Path) -> None:
    datasets = build(write_folder(tmp_path))
    with open(tmp_path / "train/dog/2.png", "ab") as file:
        file.write(b"x")
    reader = SampleReader(datasets.train, image_shape=(3, 16, 16), num_classes=2, num_workers=2)  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"train/dog/2\.png cannot be read: .*its size changed from"
    ):
        list(reader.read([torch.arange(12)]))


def test_full_memory_of_the_host_names_the_keys_that_need_less(
    tmp_path: Path,
) -> None:
    words = (
        "data=imagefolder",
        f"data.root={write_folder(tmp_path / 'images')}",
        "data.image_size=100000",
    )
    done = launch(*words, "model=lenet", "global_batch_size=2", f"output_dir={tmp_path}")
    assert done.code == 1, done.output
    assert "HostMemoryError: this host has no memory left: " in done.output
    assert "gradient_accumulation_steps=2 for half as many images" in done.output
