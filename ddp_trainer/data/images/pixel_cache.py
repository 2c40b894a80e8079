"""The cache of decoded, scaled-down images, in files that all ranks of a node map into memory.

A cache is a folder with two files. `PIXELS` has the pixels of one image after another, uint8
[H, W, C]; for a bad image, it has the reason instead, as UTF-8. `RECORDS` has a `RECORD` for each
image. The folder is built under another name, and renamed when it is complete. If a build is
killed, the next build continues after the last image whose bytes and record are complete.
"""

import errno
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, path_error, require
from ddp_trainer.cores import usable_cores
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.images.file_index import Array
from ddp_trainer.data.read_ahead import read_ahead
from ddp_trainer.files import lock_file
from ddp_trainer.progress import show_progress

PIXELS = "pixels"
RECORDS = "records"
RECORD = np.dtype([("end", "<i8"), ("height", "<u4"), ("crc32", "<u4")])
"""End of the image's bytes in `PIXELS`, height (0: a bad image), CRC-32 of bytes and height."""
LOCK_SECONDS = 7 * 24 * 3600.0
"""The longest time that a process waits for another process to build the cache."""
AHEAD_PER_THREAD = 4
"""Number of images per thread that a build reads in advance."""


class DamagedCacheError(RuntimeError):
    """The bytes of a cached image are not the bytes that were written."""


class PixelCache:
    """The cached images of a split; any number of threads may read at a time."""

    def __init__(self, folder: Path, *, channels: int) -> None:
        """Map the cache in `folder` into memory; ConfigError if it is damaged."""
        self.folder = folder
        self.channels = channels
        self.records = read_records(folder)
        self._ends = np.append(0, self.records["end"])
        is_increasing = bool((np.diff(self._ends) > 0).all())
        require(
            is_increasing and self._ends[-1] == (folder / PIXELS).stat().st_size,
            f"the cache {folder} is damaged: remove it, and the next run builds it again",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch cannot mark a tensor as read-only
            self.pixels = torch.from_numpy(np.memmap(folder / PIXELS, np.uint8, "r"))
        self._is_checked = bytearray(len(self.records))

    def __getitem__(self, index: int) -> Tensor:
        """Return image `index`, uint8 [C, H, W], as a view of the file; check it at the first read.

        Raises:
            BadImageError: the image could not be decoded when the cache was built.
            DamagedCacheError: the image's bytes have changed since then.
        """
        _, height, crc = self.records[index].tolist()
        start, end = self._ends[index : index + 2].tolist()
        block = self.pixels[start:end]
        if not self._is_checked[index]:
            if zlib.crc32(block.numpy().data, height) != crc:
                raise DamagedCacheError(
                    f"the cache {self.folder} is damaged (its checksum differs): remove it, and"
                    " check disk and memory"
                )
            self._is_checked[index] = True
        if height == 0:
            raise BadImageError(block.numpy().tobytes().decode(errors="replace"))
        return block.view(height, -1, self.channels).permute(2, 0, 1)


def open_cache(
    folder: Path, read: Callable[[int], Tensor], *, count: int, channels: int = 3
) -> PixelCache:
    """Return the cache in `folder`. If there is none, one process of this node builds the cache.

    read: takes an index from 0 to `count` - 1, and returns the image, uint8 [C, H, W], or raises
    BadImageError. Other errors of `read` end the build.

    Raises:
        ConfigError: the cache cannot be written, is damaged, or does not fit on the disk.
        TransientError: another process takes too long to build the cache, or the file system fails.
    """
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = folder.with_name(f"{folder.name}.lock")
            holder = f"another process has been building {folder} for a week: end it if it hangs"
            with lock_file(lock, seconds=LOCK_SECONDS, holder=holder):
                if not folder.is_dir():
                    build(folder, read, count=count)
        return PixelCache(folder, channels=channels)
    except OSError as error:
        raise path_error(
            error,
            f"data.cache=uint8 cannot use {folder}: {error.strerror}; set data.cache_dir=… to"
            " another folder",
        ) from error


def build(folder: Path, read: Callable[[int], Tensor], *, count: int) -> None:
    """Build the cache beside `folder`, or continue a killed build, and rename it to `folder`.

    read, count: see `open_cache`. If the disk is full, the written files are removed, because other
    programs need the space, and ConfigError is raised.
    """
    building = folder.with_name(f"{folder.name}.building")
    building.mkdir(exist_ok=True)
    for path in (building, building / PIXELS, building / RECORDS):
        is_expected = path.is_dir() if path == building else is_single_file(path)
        require(
            is_expected and not path.is_symlink(),
            f"{path} is a link or no file of a cache: remove it; somebody else may have made it",
        )
    done = keep_whole_images(building)
    num_threads = usable_cores()
    images = read_ahead(
        lambda pool, index: pool.submit(read, index),
        range(done, count),
        num_threads=num_threads,
        ahead=num_threads * AHEAD_PER_THREAD,
    )
    try:
        with (
            open(building / PIXELS, "ab") as pixels,
            open(building / RECORDS, "ab") as records,
            show_progress(
                f"building a cache in {folder.parent}", total=count, done=done
            ) as advance,
            closing(images),
        ):
            for image in images:
                block, height = to_bytes(image)
                pixels.write(block)
                pixels.flush()
                record = (pixels.tell(), height, zlib.crc32(block, height))
                # last, because after a kill only images with a record are kept
                records.write(np.array(record, RECORD).tobytes())
                records.flush()
                done += 1
                advance(1)
            for file in (pixels, records):
                os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        written = (building / PIXELS).stat().st_size
        shutil.rmtree(building, ignore_errors=True)
        needed = written / max(1, done) * count
        raise ConfigError(
            f"data.cache=uint8 needs about {needed / 1e9:.1f} GB in {folder.parent}, and the disk"
            f" is full after {written / 1e9:.1f} GB: set data.cache_dir=… to a folder on another"
            " disk, or data.cache=none"
        ) from error
    os.rename(building, folder)


def is_single_file(path: Path) -> bool:
    """Return whether `path` is missing, or is a file that has no other name (no hard link)."""
    return not path.exists() or (path.is_file() and path.stat().st_nlink == 1)


def to_bytes(image: Future[Tensor]) -> tuple[bytes | memoryview, int]:
    """Return the bytes and the height of an image; for a bad image, the reason as UTF-8, and 0."""
    try:
        pixels = image.result().permute(1, 2, 0).contiguous().numpy()
    except BadImageError as error:
        return str(error).encode(), 0
    return pixels.data, len(pixels)


def keep_whole_images(building: Path) -> int:
    """Truncate the files after the last complete image; return the number of complete images."""
    for name in (PIXELS, RECORDS):
        (building / name).touch()
    start = count = 0
    size = (building / PIXELS).stat().st_size
    with open(building / PIXELS, "rb") as pixels:
        # All bytes are read, because a host that lost power may have lost some pages of the file.
        for end, height, crc in read_records(building).tolist():
            if not start < end <= size or zlib.crc32(pixels.read(end - start), height) != crc:
                break
            start = end
            count += 1
    os.truncate(building / PIXELS, start)
    os.truncate(building / RECORDS, count * RECORD.itemsize)
    return count


def read_records(folder: Path) -> Array:
    """Return the records in `folder`, [images] of `RECORD`; an incomplete last one is ignored."""
    data = (folder / RECORDS).read_bytes()
    return np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)
