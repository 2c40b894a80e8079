"""``inspect``: what is wrong with a data set, before it is trained on."""

import csv
import json
import os
import random
import re
import shutil
import signal
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from processes import Finished, launch, run_command, succeed
from runs import TINY, train_all
from torch.utils.data import Dataset

from ddp_trainer.config.images import DataConfig
from ddp_trainer.data.dataset import Datasets, ImageTensors, sample_name
from ddp_trainer.data.held_out import hold_out
from ddp_trainer.tools.inspect.findings import find
from ddp_trainer.tools.inspect.labels import improbable_labels
from ddp_trainer.tools.inspect.scan import scan


def handwritten_digits() -> Any:
    from sklearn.datasets import load_digits  # here: each worker of pytest imports this file

    return load_digits()


def picture(seed: int) -> Image.Image:
    """Return a picture of 80 × 60 pixels with a few large and small shapes."""
    noise = np.random.default_rng(seed)
    coarse = Image.fromarray(noise.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    fine = Image.fromarray(noise.integers(0, 256, (20, 27, 3), dtype=np.uint8))
    size = (80, 60)
    return Image.blend(coarse.resize(size, 3), fine.resize(size, 3), 0.2)


NEAR: dict[str, Any] = {
    "jpeg": lambda image: image,
    "scaled": lambda image: image.resize((72, 54), 2),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop((2, 1, 79, 59)),
    "gray": lambda image: image.convert("L"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 different pictures in two classes, with known copies."""
    root = tmp_path_factory.mktemp("pictures")
    for seed in range(60):
        folder = root / ("val" if seed % 3 == 0 else "train") / ("cat", "dog")[seed % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(seed).save(folder / f"{seed}.png")
    for seed, kind in enumerate(NEAR):
        ending = "jpg" if kind == "jpeg" else "png"
        path = root / "val" / ("cat", "dog")[seed % 2] / f"{kind}.{ending}"
        NEAR[kind](picture(seed)).save(path, **({"quality": 70} if kind == "jpeg" else {}))
    picture(7).save(root / "train/cat/copy.bmp")  # a dog
    (root / "train/cat/torn.png").write_bytes((root / "train/cat/2.png").read_bytes()[:900])
    return root


def inspect(root: Path, *words: str) -> Finished:
    return launch("inspect", "data=imagefolder", f"data.root={root}", *words, f"output_dir={root}")


@pytest.fixture(scope="module")
def inspected(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    page = tmp_path_factory.mktemp("page") / "inspect.html"
    return inspect(root, f"output={page}", "data.on_bad_image=skip"), page


def test_copies_and_near_copies_are_found_and_nothing_else(
    root: Path, inspected: tuple[Finished, Path]
) -> None:
    done, page = inspected
    assert done.code == 0, done.output
    content = json.loads(page.with_suffix(".json").read_text())
    pairs = {
        frozenset(Path(image["path"]).stem for image in pair["images"])
        for pair in content["near_copies"]
    }
    assert pairs == {frozenset((str(seed), kind)) for seed, kind in enumerate(NEAR)}
    [group] = content["copies"]
    assert [Path(image["path"]).name for image in group] == ["copy.bmp", "7.png"]
    assert [image["class"] for image in group] == ["cat", "dog"]
    [bad] = content["damaged"]
    assert bad["path"] == str(root / "train/cat/torn.png")
    assert content["suspected_labels"] == []


def test_the_lines_have_counts_sizes_mean_and_standard_deviation(
    root: Path, inspected: tuple[Finished, Path]
) -> None:
    done, _ = inspected
    paths = [path for path in (root / "train").rglob("*.*") if path.name != "torn.png"]
    pixels = np.concatenate([np.asarray(Image.open(path)).reshape(-1, 3) for path in paths]) / 255
    mean = ",".join(f"{value:.4f}" for value in pixels.mean(0))
    std = ",".join(f"{value:.4f}" for value in pixels.std(0))
    assert (
        f"train: 41 images of 2 classes, 20 to 21 of a class, 60×80 pixels; mean [{mean}],"
        f" std [{std}]"
    ) in done.output
    sizes = "3 sizes from 54×72 to 60×80 pixels"
    assert f"validation: 25 images of 2 classes, 12 to 13 of a class, {sizes}" in done.output
    for line in (
        f"damaged images: 1 ({root}/train/cat/torn.png)",
        "groups of copies: 1 (1 of different classes)",
        "near copies: 5 (3 of different splits)",
        "groups in several splits: 0",
        "similar class names: 0",
    ):
        assert re.search(rf"^{re.escape(line)}$", done.output, re.MULTILINE), line


def test_the_page_has_pictures_and_loads_nothing(inspected: tuple[Finished, Path]) -> None:
    page = inspected[1].read_text()
    assert page.count('<img src="data:image/png;base64,') == 2 + 2 * len(NEAR)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert "different classes" in page
    assert "torn.png" in page


def test_the_page_is_written_if_the_output_is_not_read(root: Path, tmp_path: Path) -> None:
    words = f"{sys.executable} -m ddp_trainer inspect data=imagefolder data.root={root}"
    script = f"{words} output=page.html | true; echo ${{PIPESTATUS[0]}}"
    done = run_command(["bash", "-c", script], cwd=tmp_path)
    assert done.output.splitlines() == [str(128 + signal.SIGPIPE)]
    assert (tmp_path / "page.html").exists()
    assert (tmp_path / "page.json").exists()


def test_strict_fails_if_there_is_a_finding(root: Path, tmp_path: Path) -> None:
    assert inspect(root, "strict=true").code == 1
    for seed in range(6):
        folder = tmp_path / ("train", "val")[seed % 2] / ("cat", "dog")[seed // 2 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture(seed).save(folder / f"{seed}.png")
    done = inspect(tmp_path, "strict=true")
    assert done.code == 0, done.output
    for split in ("train", "val"):
        (tmp_path / split / "Cát").mkdir()
        picture(8 + len(split)).save(tmp_path / split / "Cát/x.png")
    done = inspect(tmp_path, "strict=true")
    assert done.code == 1
    assert "similar class names: 1" in done.output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["output=inspect.pdf"], "output=inspect.pdf must end in .html"),
        (["runs=[nowhere]"], "nowhere"),
        (["strict=perhaps"], "strict"),
        (["output=~nobody_at_all/x.html"], "~nobody_at_all/x.html"),
        ([f"output={'a' * 300}.html"], "cannot be written: File name too long"),
    ],
)
def test_wrong_options_are_one_error(words: list[str], error: str, root: Path) -> None:
    done = inspect(root, *words)
    assert done.code == 2
    assert error in done.output
    assert "Traceback" not in done.output


def test_files_of_others_are_not_replaced(root: Path, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "precious"}')
    done = inspect(root, f"output={tmp_path}/package.html")
    assert done.code == 2
    assert (
        "package.json does not look like a file of this command, and is not replaced" in done.output
    )
    assert [path.name for path in tmp_path.iterdir()] == ["package.json"]
    assert "precious" in (tmp_path / "package.json").read_text()
    for _ in range(2):  # its own files are
        assert inspect(root, f"output={tmp_path}/own.html").code == 0


def test_a_split_without_an_image_that_can_be_read_is_named(root: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "x.png").write_bytes(b"torn")
    done = inspect(tmp_path, f"output={tmp_path}/x.html")
    assert done.code == 0, done.output
    assert "validation: no image can be read" in done.output
    assert "damaged images: 4" in done.output


def test_runs_of_other_data_are_refused(root: Path, tmp_path: Path) -> None:
    words = (*TINY, "epochs=1", f"output_dir={tmp_path}", "name=other")
    train_all(1, [words])
    done = inspect(root, f"runs=[{tmp_path}/other]")
    assert done.code == 2
    assert "was trained on other classes than those of this data set" in done.output


def test_runs_of_other_images_and_runs_given_twice_are_refused(root: Path, tmp_path: Path) -> None:
    folder = ("data=imagefolder", "data.image_size=16", "data.on_bad_image=skip")
    train = ("model=lenet", "max_steps=1", "logger=[]", "global_batch_size=8")
    place = (f"output_dir={tmp_path}", "name=run")
    train_all(1, [(*folder, *train, *place, f"data.root={os.path.relpath(root)}")])
    shutil.copytree(root, tmp_path / "copy")
    for images, times, error in (
        (root, 1, ""),
        (root, 2, "were evaluated on the same images: give one run for each data.fold"),
        (tmp_path / "copy", 1, "which this data set lacks: give runs of it"),
    ):
        runs = ",".join([f"{tmp_path}/run"] * times)
        done = inspect(images, f"runs=[{runs}]", *folder[2:])
        assert error in done.output
        assert (done.code == 2) == bool(error), done.output


def test_folds_of_images_in_memory_keep_their_numbers() -> None:
    data = DataConfig(name="digits", num_folds=3, fold=1)
    whole = ImageTensors(torch.arange(9).view(9, 1, 1, 1), torch.zeros(9, dtype=torch.long))
    part = hold_out(Datasets(whole, whole, ["cat"]), data).eval
    names = [sample_name(part, index) for index in range(3)]
    assert names == [f"sample {number}" for number in part.images.flatten()]  # type: ignore[union-attr]


class Grouped(Dataset[Any]):
    """Images in memory, with groups."""

    def __init__(self, groups: list[int], seed: int) -> None:
        self.groups = torch.tensor(groups)
        self.labels = torch.zeros(len(groups), dtype=torch.long)
        self.images = [picture(100 * seed + number) for number in range(len(groups))]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.images[index], 0


def test_groups_of_a_data_set_of_your_own_are_compared() -> None:
    splits: Any = {"train": Grouped([1, 2, 3, 3], 1), "test": Grouped([4, 3, 1], 2)}
    findings = find(scan(splits, ["all"], num_threads=2), [])
    assert sorted(findings.groups_on_both_sides) == [1, 3]
    assert findings.copies == findings.near == []


def test_images_in_memory_are_compared_too() -> None:
    """All of 1,797 digits: the two that are equal are found in the pixels themselves."""
    digits = handwritten_digits()
    images = torch.from_numpy(digits.images * 15).to(torch.uint8)[:, None]
    images = torch.cat([images, images[[5, 900]]])
    labels = torch.zeros(len(images), dtype=torch.long)
    splits: Any = {
        "train": ImageTensors(images[:1000], labels[:1000]),
        "test": ImageTensors(images[1000:], labels[1000:]),
    }
    findings = find(scan(splits, ["all"], num_threads=2), [])
    expected = {
        frozenset((a, b))
        for a, b in combinations(range(len(images)), 2)
        if {a, b} & {5, 900, 1797, 1798} and torch.equal(images[a], images[b])
    }
    found = {frozenset(pair) for group in findings.copies for pair in combinations(group, 2)}
    assert expected <= found
    assert all(torch.equal(images[a], images[b]) for a, b in map(sorted, found))


@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 60))
def test_improbable_labels_are_those_of_the_rule(seed: int, c: int, n: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(n, c, generator=noise)).softmax(1)
    labels = torch.randint(0, c, (n,), generator=noise)
    expected = {}
    for place in range(n):
        row = probabilities[place].tolist()
        label = int(labels[place])
        others = probabilities[labels != label, label].tolist()
        best = max(range(c), key=lambda k: row[k])
        if others and row[label] < sum(others) / len(others) and best != label:
            expected[place] = best
    found = improbable_labels(probabilities, labels)
    assert dict(found) == expected
    margins = [float(probabilities[p, labels[p]] - probabilities[p, k]) for p, k in found]
    assert margins == sorted(margins)


def test_wrong_labels_are_found_with_the_runs_of_a_cross_validation(tmp_path: Path) -> None:
    digits = handwritten_digits()
    names = random.Random(0)
    wrong = set(names.sample(range(len(digits.images)), 36))
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            Image.fromarray((image * 15).astype(np.uint8)).save(tmp_path / f"{number}.png")
            shown = (label + names.randrange(1, 10)) % 10 if number in wrong else label
            writer.writerow([f"{number}.png", f"digit {shown}"])
    data = ("data=manifest", f"data.file={tmp_path}/labels.csv", f"data.cache_dir={tmp_path}/cache")
    words = (*data, "data.image_size=16", "data.channels=1", "data.mean=[0.3]", "data.std=[0.35]")
    crop = "data.augment.random_resized_crop=null"
    model = ("model=lenet", "precision=fp32", "num_threads=1")
    train = (*model, "epochs=8", "logger=[]", "global_batch_size=32", "data.num_folds=2")
    jobs = [
        (
            *words,
            *train,
            crop,
            "data.augment.random_hflip=false",
            f"data.fold={fold}",
            f"output_dir={tmp_path}/runs",
            f"name={fold}",
        )
        for fold in range(2)
    ]
    train_all(1, jobs)
    page = tmp_path / "inspect.html"
    done = succeed("inspect", *words, "data.fold=0", f"runs=[{tmp_path}/runs/*]", f"output={page}")
    suspects = json.loads(page.with_suffix(".json").read_text())["suspected_labels"]
    found = {int(Path(suspect["path"]).stem) for suspect in suspects}
    assert len(found & wrong) >= 0.8 * len(wrong), done.output
    assert len(found - wrong) <= 0.01 * len(digits.images), len(found - wrong)
    clear = [suspect for suspect in suspects[:20] if int(Path(suspect["path"]).stem) in wrong]
    assert len(clear) >= 15
    for suspect in clear:
        number = int(Path(suspect["path"]).stem)
        assert suspect["suggested"] == f"digit {digits.target[number]}"
