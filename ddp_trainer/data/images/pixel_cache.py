"""The cache of a folder's images, scaled down, in files that all ranks of a node map.

A cache is a folder with three files: `PIXELS` has uint8 [H, W, 3] of one image after another,
`RECORDS` has a record for each image, and `BAD` has the reasons why images could not be decoded.
The folder is built under another name, and renamed when it is complete.
"""

import errno
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, path_error, require
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.read_ahead import read_ahead
from ddp_trainer.files import lock_file, replace_file, replace_text
from ddp_trainer.progress import show_progress

PIXELS = "pixels"
RECORDS = "records"
BAD = "bad.jsonl"
RECORD = np.dtype([("height", "<u4"), ("width", "<u4"), ("crc32", "<u4")])
"""The sides of an image in pixels (0 if it is bad), and the checksum of its bytes."""
LOCK_SECONDS = 7 * 24 * 3600.0
"""How long a rank waits for another rank that builds the cache."""
AHEAD_PER_THREAD = 4

Decoded = Tensor | BadImageError


class DamagedCacheError(RuntimeError):
    """The bytes of the cache differ from those that were written."""


class PixelCache:
    """The decoded images of a split, from the files of `open_cache`, for any number of threads."""

    def __init__(self, folder: Path, *, count: int) -> None:
        """Map the cache of `count` images in `folder` into memory; ConfigError if it is damaged."""
        self.folder = folder
        self.records = np.fromfile(folder / RECORDS, RECORD)
        lengths = self.records["height"].astype(np.int64) * self.records["width"] * 3
        self._ends = lengths.cumsum()
        is_whole = len(self.records) == count and (folder / PIXELS).stat().st_size == lengths.sum()
        require(
            is_whole, f"the cache {folder} is damaged: remove it, and the next run builds it again"
        )
        require(bool(lengths.any()), f"no image can be decoded: {folder / BAD} lists the reasons")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch cannot mark a tensor as read-only
            self.pixels = torch.from_numpy(np.memmap(folder / PIXELS, np.uint8, "r"))
        self._is_checked = bytearray(count)
        reasons = (folder / BAD).read_text().splitlines()
        self.reasons: dict[int, str] = dict(map(json.loads, reasons))

    def __getitem__(self, index: int) -> Tensor:
        """Return an image, uint8 [3, H, W], as a view of the file; check it at the first read.

        Raises:
            BadImageError: the image could not be decoded when the cache was built.
            DamagedCacheError: its bytes have changed since then.
        """
        height, width, crc = self.records[index].tolist()
        if height == 0:
            raise BadImageError(self.reasons.get(index, "it could not be decoded"))
        end = int(self._ends[index])
        block = self.pixels[end - height * width * 3 : end]
        if not self._is_checked[index]:
            if zlib.crc32(block.numpy().data) != crc:
                raise DamagedCacheError(
                    f"the cache {self.folder} is damaged (its checksum differs): remove it, and"
                    " check disk and memory"
                )
            self._is_checked[index] = True
        return block.view(height, width, 3).permute(2, 0, 1)


def open_cache(
    folder: Path, read: Callable[[int], Tensor], *, count: int, num_threads: int, task: str
) -> PixelCache:
    """Return the cache in `folder`, which one process of this node builds if there is none.

    read: returns the image with a number from 0 to count - 1, uint8 [3, H, W], or raises
    BadImageError. task: the text beside the progress bar.

    Raises:
        ConfigError: the cache cannot be written, is damaged, or does not fit on the disk.
        TransientError: another process takes too long to build the cache, or the file system fails.
    """
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = folder.with_name(f"{folder.name}.lock")
            holder = f"another process has been building {folder} for a week: is it still running?"
            with lock_file(lock, seconds=LOCK_SECONDS, holder=holder):
                if not folder.is_dir():
                    build(folder, read, count=count, num_threads=num_threads, task=task)
        return PixelCache(folder, count=count)
    except OSError as error:
        raise path_error(
            error,
            f"data.cache=uint8 cannot use {folder}: {error.strerror}; set data.cache_dir=… to"
            " another folder",
        ) from error


def build(
    folder: Path, read: Callable[[int], Tensor], *, count: int, num_threads: int, task: str
) -> None:
    """Write the cache beside `folder`, and rename it. read, count, task: see `open_cache`.

    If the disk is full, raises ConfigError. After any error, what was written is removed, because
    other programs need the space.
    """
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)  # of a build that was killed
    building.mkdir()
    try:
        with (
            show_progress(task, total=count) as advance,
            closing(decode_in_order(read, range(count), num_threads)) as images,
        ):
            write_images(building, images, advance)
        os.rename(building, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"data.cache=uint8 does not fit into {folder.parent}, whose disk is full: set"
            " data.cache_dir=… to a folder on another disk, or data.cache=none"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_images(folder: Path, images: Iterable[Decoded], advance: Callable[[int], None]) -> None:
    """Write the three files of a cache. advance: called with 1 after each image."""
    records: list[tuple[int, int, int]] = []
    reasons: list[str] = []
    with replace_file(folder / PIXELS) as pixels:
        for index, image in enumerate(images):
            if isinstance(image, BadImageError):
                reasons.append(json.dumps([index, str(image)]) + "\n")
                records.append((0, 0, 0))
            else:
                block = image.permute(1, 2, 0).contiguous().numpy()
                pixels.write(block.data)
                records.append((*block.shape[:2], zlib.crc32(block.data)))
            advance(1)
    replace_text(folder / BAD, "".join(reasons))
    with replace_file(folder / RECORDS) as file:
        file.write(np.array(records, RECORD).tobytes())


def decode_in_order(
    read: Callable[[int], Tensor], indices: range, num_threads: int
) -> Generator[Decoded]:
    """Yield images, decoded by threads, in order; a bad image is replaced by its BadImageError."""

    def decode(index: int) -> Decoded:
        try:
            return read(index)
        except BadImageError as error:
            return error

    def begin(pool: ThreadPoolExecutor, index: int) -> Future[Decoded]:
        return pool.submit(decode, index)

    ahead = num_threads * AHEAD_PER_THREAD
    with closing(read_ahead(begin, indices, num_threads=num_threads, ahead=ahead)) as futures:
        for future in futures:
            yield future.result()
