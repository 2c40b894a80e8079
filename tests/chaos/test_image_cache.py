"""Folders of images under fire: kills while the cache is built and while images are read, and a
million files.
"""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import IS_FULL, memory_disk, trials
from PIL import Image
from processes import forkserver, wait_for
from runs import assert_bitwise, compose, kill_in_training, newest_step, train_on, trained_state

from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.data.images.decoding import shrink
from ddp_trainer.data.images.file_index import load_index
from ddp_trainer.data.images.image_files import ImageFiles
from ddp_trainer.observers.ranks import peak_memory_mb

BUILD_KILLS = trials(25, full=100)
TRAIN_KILLS = trials(4, full=20)
EPOCHS = 10 + TRAIN_KILLS


def write_photos(root: Path, *, count: int, size: tuple[int, int] = (300, 400)) -> Path:
    """Write so many JPEGs of smooth noise in three classes."""
    noise = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        for split in ("train", "val") if number % 4 == 0 else ("train",):
            folder = root / split / f"class {number % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC).save(
                folder / f"{number}.jpg", quality=90
            )
    return root


def folder_words(root: Path, cache_dir: Path, *, cache: str) -> tuple[str, ...]:
    return (
        "data=imagefolder",
        f"data.root={root}",
        f"data.cache={cache}",
        f"data.cache_dir={cache_dir}",
        "data.image_size=24",
        "model=lenet",
        "precision=fp32",
    )


def build(words: tuple[str, ...]) -> Datasets:
    return build_datasets(compose(*words).data)


@pytest.mark.fault("SIGKILL while the cache of images is built", times=BUILD_KILLS)
@pytest.mark.timeout(600)
def test_a_cache_whose_build_is_killed_is_never_seen_half_built(tmp_path: Path) -> None:
    words = folder_words(
        write_photos(tmp_path / "photos", count=200), tmp_path / "cache", cache="uint8"
    )
    context = forkserver()
    chance = random.Random(0)
    killed = built = 0
    while killed < BUILD_KILLS:
        process = context.Process(target=build, args=(words,))
        process.start()
        building = tmp_path / "cache"
        before = num_bytes_built(building)

        def has_moved_or_ended(building=building, before=before, process=process) -> bool:  # type: ignore[no-untyped-def]
            return num_bytes_built(building) != before or process.exitcode is not None

        wait_for(has_moved_or_ended)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        killed += process.exitcode == -9
        whole = sorted(building.glob("*.cache"))
        for path in whole:  # one that is visible is whole
            assert not path.with_name(f"{path.name}.building").exists()
        if len(whole) == 2:
            assert_whole(words)
            built += 1
            for path in whole:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
    build(words)
    assert_whole(words)
    assert built > 0


def num_bytes_built(folder: Path) -> int:
    """Return the sizes of the records of caches that are being built."""
    total = 0
    for path in folder.glob("*.building/records"):
        with suppress(FileNotFoundError):  # it has become whole
            total += path.stat().st_size
    return total


def assert_whole(words: tuple[str, ...]) -> None:
    """Compare all images of the cache with those of the files, scaled to 24 / 0.875 pixels."""
    datasets = build(words)
    for split in (datasets.train, datasets.eval):
        assert isinstance(split, ImageFiles)
        assert split.cache is not None
        for index in range(len(split)):
            assert torch.equal(split.cache[index], shrink(split.decode(index), 27))


@pytest.mark.fault("SIGKILL in mid-epoch with images streamed or cached", times=TRAIN_KILLS // 2)
@pytest.mark.parametrize("cache", ["none", "uint8"])
@pytest.mark.parametrize("ranks", [1, 2, 3] if IS_FULL else [1, 3])
@pytest.mark.timeout(600)
def test_a_run_on_images_killed_in_mid_epoch_ends_as_one_left_alone(
    ranks: int, cache: str, tmp_path: Path
) -> None:
    root = write_photos(tmp_path / "photos", count=96, size=(60, 80))
    words = (
        *folder_words(root, tmp_path / "cache", cache=cache),
        f"output_dir={tmp_path}",
        "global_batch_size=12",
        f"epochs={EPOCHS}",
        "checkpoint.every_steps=2",
    )
    chance = random.Random(ranks)
    run_dir = tmp_path / "run"
    for _ in range(TRAIN_KILLS // 2):
        kill_in_training(ranks, compose(*words, "name=run"), run_dir, after=chance.uniform(0, 0.2))
    assert newest_step(run_dir) < EPOCHS * 8, "the run was over before its last kill"
    train_on(ranks, *words, "name=run", deadline=300)
    train_on(ranks, *words, "name=alone", deadline=300)
    assert_bitwise(trained_state(tmp_path / "alone"), trained_state(run_dir))


CPU = torch.device("cpu")
NUM_FILES = 1_000_000
NUM_CLASSES = 1000


def time_index(root: Path, cache_dir: Path) -> tuple[float, float]:
    """Return the CPU seconds until this process has the index of `root`, and by how many MB its
    memory grew.
    """
    began = time.process_time()
    before = peak_memory_mb(CPU)
    index = load_index(root, cache_dir)
    assert len(index) == NUM_FILES
    return time.process_time() - began, peak_memory_mb(CPU) - before


@pytest.mark.fault("no fault: a folder of a million files is scanned, and found again")
@pytest.mark.timeout(900)
def test_a_million_files_are_scanned_once(tmp_path: Path) -> None:
    with memory_disk(
        tmp_path / "disk", f"size=64m,nr_inodes={NUM_FILES + 10_000}"
    ) as root:  # a disk would slow others
        for number in range(NUM_CLASSES):
            folder = root / f"class-{number:04d}"
            folder.mkdir()
            for name in range(NUM_FILES // NUM_CLASSES):
                os.close(os.open(folder / f"{name:06d}.jpg", os.O_CREAT | os.O_WRONLY))
        time.sleep(4)  # a folder that changed just now would be scanned again
        with forkserver().Pool(1, maxtasksperchild=1) as pool:
            scan_seconds, scan_mb = pool.apply(time_index, (root, tmp_path / "cache"))
            load_seconds, load_mb = pool.apply(time_index, (root, tmp_path / "cache"))
    print(
        f"scan {scan_seconds:.1f} s, {scan_mb:.0f} MB; from the file {load_seconds:.2f} s,"
        f" {load_mb:.0f} MB"
    )
    assert load_seconds < scan_seconds / 10  # 0.14 and 11.5 s
    assert load_mb < 200
