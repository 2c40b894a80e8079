"""The cache of images: the same pixels as from the files, one copy per node, and no damage goes
unnoticed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from processes import on_ranks
from test_image_folder import build, write_folder
from torch import Tensor

from ddp_trainer.config.data import Cache
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.data.dataset import BadImageError, Datasets
from ddp_trainer.data.images import pixel_cache
from ddp_trainer.data.images.decoding import shrink
from ddp_trainer.data.images.image_files import ImageFiles
from ddp_trainer.data.images.pixel_cache import (
    PIXELS,
    RECORD,
    RECORDS,
    DamagedCacheError,
    PixelCache,
    open_cache,
)

COUNT = 40


def picture(index: int) -> Tensor:
    """Return image `index`, uint8 [3, H, W]; every tenth is bad."""
    if index % 10 == 3:
        raise BadImageError(f"image {index}\nis bad")
    size = (3, 5 + index % 4, 6 + index % 3)
    return torch.randint(
        256, size, generator=torch.Generator().manual_seed(index), dtype=torch.uint8
    )


def open_pictures(
    folder: Path, read: Callable[[int], Tensor] = picture, *, num_threads: int = 3
) -> PixelCache:
    with patch.object(pixel_cache, "usable_cores", return_value=num_threads):
        return open_cache(folder, read, count=COUNT)


def assert_whole(cache: PixelCache) -> None:
    for index in range(COUNT):
        if index % 10 == 3:
            with pytest.raises(BadImageError, match=f"^image {index}\nis bad$"):
                cache[index]
        else:
            assert torch.equal(cache[index], picture(index))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_cache_has_all_images_and_the_reasons_of_bad_ones(
    num_threads: int, tmp_path: Path
) -> None:
    assert_whole(open_pictures(tmp_path / "cache", num_threads=num_threads))
    assert_whole(open_pictures(tmp_path / "cache", lambda index: pytest.fail("read again")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "cache.lock"]


@pytest.mark.parametrize("number", [0, 1, 13, COUNT - 1])
@pytest.mark.parametrize("torn", [None, PIXELS, RECORDS])
def test_a_build_that_ended_early_is_continued(
    number: int, torn: str | None, tmp_path: Path
) -> None:
    def interrupted(index: int) -> Tensor:
        if index == number:
            raise KeyboardInterrupt
        return picture(index)

    read_again = []

    def noted(index: int) -> Tensor:
        read_again.append(index)
        return picture(index)

    with pytest.raises(KeyboardInterrupt):
        open_pictures(tmp_path / "cache", interrupted, num_threads=1)
    assert not (tmp_path / "cache").exists()
    if torn is not None:  # as a kill or a loss of power may leave it
        with open(tmp_path / "cache.building" / torn, "ab") as file:
            file.write(b"[3, torn")
    assert_whole(open_pictures(tmp_path / "cache", noted))
    assert min(read_again) == number


@pytest.mark.parametrize(("name", "start"), [(PIXELS, 500), (RECORDS, 20 * RECORD.itemsize)])
def test_pages_that_a_loss_of_power_has_emptied_are_written_again(
    name: str, start: int, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        open_pictures(
            tmp_path / "cache", lambda index: picture(index // (index < 30)), num_threads=1
        )
    with open(tmp_path / "cache.building" / name, "r+b") as file:
        file.seek(start)
        file.write(bytes(2 * RECORD.itemsize))
    assert_whole(open_pictures(tmp_path / "cache"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def test_a_flipped_byte_is_found_where_it_is(tmp_path: Path) -> None:
    open_pictures(tmp_path / "cache")
    flip(tmp_path / "cache" / PIXELS, 200)  # 5·6·3 + 6·7·3 = 216
    cache = open_pictures(tmp_path / "cache")
    assert torch.equal(cache[0], picture(0))
    with pytest.raises(
        DamagedCacheError,
        match=f"^the cache {tmp_path}/cache is damaged \\(its checksum differs\\): remove",
    ):
        cache[1]
    assert torch.equal(cache[2], picture(2))


WRONG: dict[str, Callable[[Path], Any]] = {
    "pixels were cut off": lambda cache: os.truncate(cache / PIXELS, 1000),
    "records were cut off": lambda cache: os.truncate(cache / RECORDS, 10 * RECORD.itemsize),
    "a record is wrong": lambda cache: flip(cache / RECORDS, 1),
    "pixels are missing": lambda cache: (cache / PIXELS).unlink(),
    "records are missing": lambda cache: (cache / RECORDS).unlink(),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_cache_that_is_not_whole_is_one_error(change: str, tmp_path: Path) -> None:
    open_pictures(tmp_path / "cache")
    WRONG[change](tmp_path / "cache")
    with pytest.raises(ConfigError) as error:
        open_pictures(tmp_path / "cache")
    assert str(tmp_path / "cache") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_full_disk_is_one_error_and_is_left_as_it_was(small_disk: Path) -> None:
    def large(index: int) -> Tensor:
        return torch.zeros(3, 300, 400, dtype=torch.uint8)  # of 40 such, 4 MiB hold eleven

    with pytest.raises(
        ConfigError,
        match=r"^data\.cache=uint8 needs about 0\.0 GB in .*, and the disk is full after",
    ):
        open_pictures(small_disk / "cache", large)
    assert [path.name for path in small_disk.iterdir()] == ["cache.lock"]
    assert_whole(open_pictures(small_disk / "cache"))


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"^data\.cache=uint8 cannot use .*/file/cache: .*; set data\.cache_dir="
    ):
        open_pictures(tmp_path / "file" / "cache")


def large_picture(index: int) -> Tensor:
    return torch.full((3, 256, 256), index, dtype=torch.uint8)


def shared_share(folder: Path) -> float:
    """Read a cache of 8 MB on two ranks, and return the share of its memory that counts as this
    rank's own.
    """
    cache = open_cache(folder, large_picture, count=COUNT)
    total = sum(int(cache[index].sum()) for index in range(COUNT))
    assert total == 3 * 256 * 256 * sum(range(COUNT))
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    [own] = [text for text in maps if f"/{folder.name}/{PIXELS}" in text]
    torch.distributed.barrier()
    values = {
        line.split(":")[0]: int(line.split()[1])
        for line in own.splitlines()
        if line.endswith(" kB")
    }
    return values["Pss"] / values["Rss"]


def test_ranks_share_one_copy_in_memory(tmp_path: Path) -> None:
    assert all(share < 0.6 for share in on_ranks(2, shared_share, tmp_path / "cache"))


# --- of a folder of images ----------------------------------------------------------------------


def cached(root: Path, cache_dir: Path, **options: Any) -> Datasets:
    return build(root, cache=Cache.uint8, cache_dir=str(cache_dir), **options)


def test_images_come_from_the_cache_as_they_were_scaled(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "root")
    datasets = cached(root, tmp_path / "cache")
    streamed = build(root)
    for split, files in ((datasets.train, streamed.train), (datasets.eval, streamed.eval)):
        assert isinstance(split, ImageFiles)
        assert isinstance(files, ImageFiles)
        assert split.cache is not None
        assert split.fingerprint() == files.fingerprint()
        for index in range(len(split)):
            whole = files.decode(index)
            assert torch.equal(split.cache[index], shrink(whole, 18))
            assert min(split.cache[index].shape[1:]) == 18
            draws = torch.rand(4, generator=torch.Generator().manual_seed(index)).tolist()
            image, label = split.read(index, draws)
            assert image.shape == (3, 16, 16)
            assert label == split.labels[index]
            apart = image.int() - files.read(index, draws)[0].int()
            assert apart.abs().float().mean() < 12  # another scale on the way


def test_a_changed_folder_has_another_cache(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "root", splits=("",))
    cache_dir = tmp_path / "cache"
    options: dict[str, Any] = {"validation_fraction": 0.3}
    cached(root, cache_dir, **options)
    cached(root, cache_dir, **options)
    assert len(list(cache_dir.glob("*.cache"))) == 1
    os.utime(root / "cat/0.png", (0, 0))
    cached(root, cache_dir, **options)
    assert len(list(cache_dir.glob("*.cache"))) == 2


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 30, 40), (3, 18, 24)),
        ((3, 40, 30), (3, 24, 18)),
        ((3, 18, 300), (3, 18, 300)),
        ((3, 36, 300), (3, 18, 150)),
        ((3, 100, 9), (3, 100, 9)),
        ((3, 1, 1), (3, 1, 1)),
        ((3, 36, 36), (3, 18, 18)),
        ((3, 39, 36), (3, 20, 18)),
    ],
)
def test_images_are_scaled_down_and_never_up(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    shrunk = shrink(image, 18)
    assert shrunk.shape == expected
    assert shape != expected or torch.equal(shrunk, image)


def test_a_file_that_may_not_be_read_ends_the_build_and_is_not_kept_as_a_bad_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path / "root")
    read = np.fromfile

    def refused(path: str, dtype: Any) -> np.ndarray:  # root may read everything
        if path.endswith("dog/2.png"):
            raise PermissionError(13, "Permission denied", path)
        return read(path, dtype)

    monkeypatch.setattr(np, "fromfile", refused)
    with pytest.raises(
        ConfigError,
        match=r"dog/2\.png cannot be read \(Permission denied\): make it readable, or remove it$",
    ):
        cached(root, tmp_path / "cache")
    monkeypatch.undo()
    datasets = cached(root, tmp_path / "cache")
    assert isinstance(datasets.train, ImageFiles)
    assert datasets.train.cache is not None
    assert datasets.train.cache.records["height"].all()


def test_no_file_of_another_name_is_written_into(tmp_path: Path) -> None:
    other = tmp_path / "mine.txt"
    other.write_text("text")
    (tmp_path / "cache.building").mkdir()
    (tmp_path / "cache.building" / PIXELS).hardlink_to(other)
    with pytest.raises(ConfigError, match=f"{PIXELS} is a link"):
        open_pictures(tmp_path / "cache")
    assert other.read_text() == "text"
