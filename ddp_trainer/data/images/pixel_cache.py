"""The cache of a folder's images, scaled down, in files that all ranks of a node map.

A cache is a folder with three files: `PIXELS` has uint8 [H, W, 3] of one image after another,
`RECORDS` has a record for each image, and `BAD` has the reasons why images could not be decoded.
The folder is built under another name, and renamed when it is complete. A build that was killed is
continued after the last image whose bytes and record are whole.
"""

import errno
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, path_error, require
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.images.file_index import Array
from ddp_trainer.data.read_ahead import read_ahead
from ddp_trainer.files import lock_file, replace_text
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
        self.records = read_records(folder)
        lengths = sizes(self.records)
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
        self.reasons = read_reasons(folder)

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
    """Write the cache beside `folder`, from where a killed build ended, and rename it.

    read, count, task: see `open_cache`. If the disk is full, raises ConfigError after removing what
    was written, because other programs need the space.
    """
    building = folder.with_name(f"{folder.name}.building")
    building.mkdir(exist_ok=True)
    done = keep_whole_images(building)
    try:
        with (
            open(building / PIXELS, "ab") as pixels,
            open(building / RECORDS, "ab") as records,
            open(building / BAD, "a") as reasons,
            show_progress(task, total=count, done=done) as advance,
            closing(decode_in_order(read, range(done, count), num_threads)) as images,
        ):
            for index, image in enumerate(images, done):
                record = write_image(pixels, reasons, index, image)
                pixels.flush()
                reasons.flush()
                records.write(record)  # last: an image without its record is written again
                records.flush()
                done += 1
                advance(1)
            for file in (pixels, reasons, records):
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


def write_image(pixels: BinaryIO, reasons: Any, index: int, image: Decoded) -> bytes:
    """Append an image to `pixels`, or its error to `reasons`; return its `RECORD`."""
    if isinstance(image, BadImageError):
        reasons.write(json.dumps([index, str(image)]) + "\n")
        return np.array((0, 0, 0), RECORD).tobytes()
    block = image.permute(1, 2, 0).contiguous().numpy()
    pixels.write(block.data)
    return np.array((*block.shape[:2], zlib.crc32(block.data)), RECORD).tobytes()


def keep_whole_images(building: Path) -> int:
    """Truncate the files after the last complete image; return the number of complete images."""
    for name in (PIXELS, RECORDS, BAD):
        (building / name).touch()
    records = read_records(building)
    reasons = read_reasons(building)
    ends = sizes(records).cumsum()
    count = int(np.searchsorted(ends, (building / PIXELS).stat().st_size, side="right"))
    with open(
        building / PIXELS, "rb"
    ) as pixels:  # in full, because a host that lost power may have lost some pages
        for index, record in enumerate(records[:count]):
            height, width, crc = record.tolist()
            if zlib.crc32(pixels.read(height * width * 3)) != crc or (
                height == 0 and index not in reasons
            ):
                count = index
                break
    whole = [json.dumps([index, text]) + "\n" for index, text in reasons.items() if index < count]
    replace_text(building / BAD, "".join(whole))
    os.truncate(building / PIXELS, int(ends[count - 1]) if count else 0)
    os.truncate(building / RECORDS, count * RECORD.itemsize)
    return count


def read_records(folder: Path) -> Array:
    """Return the image records in `folder`; an incomplete last record is ignored."""
    data = (folder / RECORDS).read_bytes()
    return np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)


def sizes(records: Array) -> Array:
    """Return the size of each image in bytes: int64 [N]."""
    return records["height"].astype(np.int64) * records["width"] * 3


def read_reasons(folder: Path) -> dict[int, str]:
    """Return the reason for each bad image by its index; a line that was cut off is ignored."""
    reasons = {}
    for line in (folder / BAD).read_text().splitlines():
        with suppress(ValueError):
            index, reason = json.loads(line)
            reasons[index] = reason
    return reasons
