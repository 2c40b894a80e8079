"""Reads every image of a data set once, and keeps a digest and a thumbnail of each."""

import hashlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ddp_trainer.data.dataset import (
    BadImageError,
    ImageTensors,
    Split,
    in_whole,
    num_samples,
    per_sample,
    read_sample,
    sample_name,
)
from ddp_trainer.data.images.decoding import LUMA
from ddp_trainer.data.read_ahead import read_ahead
from ddp_trainer.progress import show_progress

SIDE = 32
"""Height and width of a thumbnail in pixels."""
CHUNK = 128
"""Number of images that a thread reads at a time."""
WAITING = 200_000
"""Number of values above which the images that a thread holds are summarized.

So few fit in a cache of the processor.
"""
Array = np.ndarray[Any, np.dtype[Any]]
IMAGE = np.dtype(
    [
        ("split", np.int8),
        ("index", np.int64),
        ("label", np.int64),
        ("digest", "S16"),
        ("height", np.int32),
        ("width", np.int32),
        ("thumb", np.uint8, (SIDE, SIDE)),
    ]
)
"""What is kept of an image: the number of its split, its index in it, its label, a hash of shape
and pixels, its height and width, and the whole image in gray at another size.
"""


@dataclass(kw_only=True, slots=True)
class Scan:
    """The N images of all splits that can be read: a row for each."""

    splits: Mapping[str, Split]
    class_names: list[str]
    images: Array
    """`IMAGE` [N], in a temporary file."""
    bad: list[tuple[str, str]]
    """(name, reason) of each image that cannot be read."""
    histograms: list[Tensor]
    """For each split: how often a channel has each value of a pixel, int64 [C, 256]."""

    def mean_and_std(self, split: int) -> tuple[list[float], list[float]]:
        """Return the mean and the standard deviation of each channel of a split."""
        counts = self.histograms[split].double()
        values = torch.arange(256, dtype=torch.float64) / 255
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        mean = shares @ values
        variance = (shares * (values - mean[:, None]) ** 2).sum(1)
        return mean.tolist(), variance.sqrt().tolist()

    def split_name(self, place: int) -> str:
        return list(self.splits)[self.images["split"][place]]

    def name(self, place: int) -> str:
        """Return the path of an image, or its number in its split."""
        split = self.splits[self.split_name(place)]
        return sample_name(split, int(self.images["index"][place]))

    def picture(self, place: int) -> Tensor:
        """Return an image, uint8 [C, H, W]."""
        split = self.splits[self.split_name(place)]
        return read_whole(split, int(self.images["index"][place]))[0]


def scan(splits: Mapping[str, Split], class_names: list[str], *, num_threads: int) -> Scan:
    """Read all images of `splits` in `num_threads` threads."""
    jobs = [
        (number, split, range(num_samples(split))[begin : begin + CHUNK])
        for number, split in enumerate(splits.values())
        for begin in range(0, num_samples(split), CHUNK)
    ]
    count = sum(map(num_samples, splits.values()))
    with tempfile.TemporaryFile() as file:  # mapped, so that the memory does not limit the number
        # else a full disk ends the process
        os.posix_fallocate(file.fileno(), 0, count * IMAGE.itemsize)
        images = np.memmap(file, IMAGE, "r+", shape=count)
    bad: list[tuple[str, str]] = []
    histograms = [torch.zeros(1, 256, dtype=torch.int64) for _ in splits]
    done = 0
    for (number, _, _), chunk in zip(jobs, read_chunks(jobs, count, num_threads), strict=True):
        images[done : done + len(chunk.images)] = chunk.images
        done += len(chunk.images)
        histograms[number] = histograms[number] + chunk.histogram
        bad += chunk.bad
    images = images[:done]
    for number, split in enumerate(splits.values()):
        labels = per_sample(split, "labels")
        if labels is not None:
            rows = images["split"] == number
            images["label"][rows] = labels.numpy()[images["index"][rows]]
    return Scan(
        splits=splits,
        class_names=class_names,
        images=images,
        bad=bad,
        histograms=histograms,
    )


@dataclass(slots=True)
class Chunk:
    """A part of a scan; see `Scan`."""

    images: Array
    bad: list[tuple[str, str]] = field(default_factory=list)
    histogram: Tensor = field(default_factory=lambda: torch.zeros(1, 256, dtype=torch.int64))


Job = tuple[int, Split, range]
"""The number of a split, the split, and the samples of a chunk."""


def read_chunks(jobs: list[Job], count: int, num_threads: int) -> Iterator[Chunk]:
    """Yield what `read_chunk` returns for each job, and show a progress bar of `count` images."""

    def begin(pool: ThreadPoolExecutor, job: Job) -> Future[Chunk]:
        return pool.submit(read_chunk, *job)

    with show_progress("reading images", total=count) as advance:
        futures = read_ahead(begin, jobs, num_threads=num_threads, ahead=2 * num_threads)
        for (_, _, ids), future in zip(jobs, futures, strict=True):
            yield future.result()
            advance(len(ids))


def read_chunk(number: int, split: Split, ids: range) -> Chunk:
    """Read the images `ids` of `split`, which has the number `number`."""
    chunk = Chunk(np.zeros(len(ids), IMAGE))
    places: list[tuple[int, int]] = []
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    rows: dict[torch.Size, list[int]] = defaultdict(list)
    waiting = 0
    for index in ids:
        try:
            image, label = read_whole(split, index)
        except RuntimeError as error:
            if not isinstance(error.__cause__, BadImageError):
                raise
            chunk.bad.append((sample_name(split, index), str(error.__cause__)))
            continue
        by_shape[image.shape].append(image)
        rows[image.shape].append(len(places))
        places.append((index, label or 0))
        waiting += image.numel()
        if waiting > WAITING:
            summarize(chunk, by_shape, rows)
            waiting = 0
    summarize(chunk, by_shape, rows)
    chunk.images = chunk.images[: len(places)]
    if places:
        chunk.images["split"] = number
        chunk.images["index"], chunk.images["label"] = np.array(places).T
    return chunk


def summarize(
    chunk: Chunk, by_shape: dict[torch.Size, list[Tensor]], rows: dict[torch.Size, list[int]]
) -> None:
    """Add images to `chunk`, at its places `rows`, and remove them from `by_shape` and `rows`.

    All images of a shape at once, because a call takes longer than a small image.
    """
    for shape, images in by_shape.items():
        places = rows[shape]
        stacked = torch.stack(images) if len(images) > 1 else images[0][None]
        chunk.images["thumb"][places] = thumbnails(stacked).numpy()
        values = stacked.transpose(0, 1).flatten(1)
        chunk.histogram = chunk.histogram + torch.stack(
            [channel.bincount(minlength=256) for channel in values]
        )
        empty = hashlib.blake2b(b"%d %d %d" % tuple(shape), digest_size=16)
        for place, pixels in zip(places, stacked.numpy(), strict=True):
            digest = empty.copy()
            digest.update(np.ascontiguousarray(pixels).data)
            chunk.images["digest"][place] = digest.digest()
        chunk.images["height"][places], chunk.images["width"][places] = shape[1:]
    by_shape.clear()
    rows.clear()


def thumbnails(images: Tensor) -> Tensor:
    """Return images in gray at the size of thumbnails: uint8 [N, C, H, W] -> [N, SIDE, SIDE]."""
    channels = interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True).unbind(1)
    weights = LUMA if len(channels) == 3 else [1 / len(channels)] * len(channels)
    gray: Any = sum(map(torch.mul, channels, weights))
    return gray.round_().to(torch.uint8)


def read_whole(split: Split, index: int) -> tuple[Tensor, int | None]:
    """Return an image without a crop, uint8 [C, H, W], and its label; None: it is in ``labels``.

    Raises: see `read_sample`.
    """
    if isinstance(split, ImageTensors):
        return split.images[index], None
    dataset, place = in_whole(split, index)
    decode = getattr(dataset, "decode", None)
    if not callable(decode):
        return read_sample(split, index)
    try:
        image: Any = decode(place)
        return image, None
    except BadImageError as error:
        raise RuntimeError(str(error)) from error
