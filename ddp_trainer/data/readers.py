"""Readers of batches: from images in memory, and from a map-style data set by threads."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.data.dataset import (
    BadSampleError,
    ImageTensors,
    Shape,
    num_samples,
    read_sample,
    sample_name,
)
from ddp_trainer.data.read_ahead import read_ahead
from ddp_trainer.distributed.waiting import record_progress

BATCHES_AHEAD = 2
PARTS_PER_THREAD = 4
"""Number of parts per thread into which the samples of a batch are divided."""
NO_LABEL = -100
"""The label of a bad sample: the ignore_index of cross_entropy."""
PendingBatch = tuple[Tensor, Tensor, list[Future[None]]]
"""Images and labels that threads write, and the futures of these writes."""


class ResidentReader:
    """Reads batches of images that stay in the memory of `device`."""

    def __init__(self, images: ImageTensors, *, device: torch.device) -> None:
        self.pixels = images.images.to(device)
        self.labels = images.labels.to(device)
        self.device = device
        """The device on which `read` takes the ids of samples."""

    def __len__(self) -> int:
        return len(self.labels)

    def read(
        self, batches: Iterable[Tensor], crops: Iterable[Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, uint8 [B, C, H, W], and labels, int64 [B], on the device.

        batches: the ids of each batch, int64 [B]. crops: ignored.
        """
        for ids in batches:
            ids = ids.to(self.device, non_blocking=True)
            yield self.pixels.index_select(0, ids), self.labels.index_select(0, ids)


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Reads batches of samples in order, at most `BATCHES_AHEAD` batches in advance."""

    dataset: Dataset[Any]
    image_shape: Shape
    num_classes: int
    num_workers: int
    """Number of threads that read; 0: read in the calling thread."""
    pin_memory: bool = False
    blank: Tensor | float = 0
    """uint8 [C, 1, 1], the color that replaces a bad sample, whose label is `NO_LABEL`."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of each bad sample, to which the reader appends."""
    device: ClassVar = torch.device("cpu")
    """The device on which `read` takes the ids of samples."""

    def __len__(self) -> int:
        return num_samples(self.dataset)

    def read(
        self, batches: Iterable[Tensor], crops: Iterable[Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, uint8 [B, C, H, W], and labels, int64 [B], on the CPU.

        A bad image is replaced by `blank`, with the label `NO_LABEL`.

        batches: the ids of each batch, int64 [B]. crops: for each batch, [B, 4], the four random
        numbers in [0, 1) that choose the crop of each image; None: center crops.

        Raises:
            RuntimeError: a sample cannot be read, for a reason other than a bad image.
            ValueError: a sample has another shape than the first sample of the data set, or its
            label is not a class.
        """
        requests = zip(batches, repeat(None) if crops is None else crops, strict=False)
        ahead = BATCHES_AHEAD if self.num_workers else 0
        begun = read_ahead(self._begin, requests, num_threads=self.num_workers, ahead=ahead)
        with closing(begun):  # because an exception's traceback would keep its threads alive
            for images, labels, parts in begun:
                for part in parts:
                    part.result()
                yield images, labels

    def _begin(
        self, pool: ThreadPoolExecutor, request: tuple[Tensor, Tensor | None]
    ) -> PendingBatch:
        """Start to read a batch. request: its ids, and its crops as in `read`."""
        ids, crops = request
        images, labels = self._allocate(len(ids))
        indices = ids.tolist()
        draws = repeat(None) if crops is None else crops.tolist()
        samples = list(zip(range(len(indices)), indices, draws, strict=False))
        label_array = labels.numpy()  # writing to it is 30 times as fast as writing to the tensor

        def fill(part: list[tuple[int, int, Any]]) -> None:
            for row, index, numbers in part:
                images[row], label_array[row] = self._sample_or_blank(index, numbers)
                record_progress()  # because a batch from a slow disk may take minutes

        if not self.num_workers:
            fill(samples)
            return images, labels, []
        # Waking a thread for each sample would take as long as reading a cached sample.
        size = max(1, len(samples) // (PARTS_PER_THREAD * self.num_workers))
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        return images, labels, [pool.submit(fill, part) for part in parts]

    @torch.inference_mode(False)  # because threads outside of it write to the tensors
    def _allocate(self, count: int) -> tuple[Tensor, Tensor]:
        """Return empty images, in the memory format of decoders, and empty labels."""
        images = torch.empty(
            (count, *self.image_shape),
            dtype=torch.uint8,
            pin_memory=self.pin_memory,
            memory_format=torch.channels_last,
        )
        return images, torch.empty(count, dtype=torch.int64, pin_memory=self.pin_memory)

    def _sample_or_blank(
        self, index: int, draws: Sequence[float] | None
    ) -> tuple[Tensor | float, int]:
        """Return `sample`, or the substitute for a bad one, which is added to `bad`."""
        try:
            return self.sample(index, draws)
        except BadSampleError as error:
            self.bad.append((sample_name(self.dataset, index), str(error.__cause__)))
            return self.blank, NO_LABEL

    def sample(self, index: int, draws: Sequence[float] | None = None) -> tuple[Tensor, int]:
        """Return the image and the label of a sample; ValueError if shape or label is wrong.

        draws: four numbers that choose the crop; None: the center crop.
        """
        image, label = read_sample(self.dataset, index, draws)
        if image.shape != self.image_shape:
            raise ValueError(
                f"{sample_name(self.dataset, index)} has the shape {list(image.shape)}, the first"
                f" image {list(self.image_shape)}: all must have the same shape"
            )
        if not 0 <= label < self.num_classes:
            raise ValueError(
                f"{sample_name(self.dataset, index)} has the label {label}: labels must be 0 to"
                f" {self.num_classes - 1}"
            )
        return image, label


Reader = ResidentReader | SampleReader


def read_images(reader: Reader, ids: Tensor) -> Tensor:
    """Return some images without augmentation: ids, int64 [B] -> uint8 [B, C, H, W]."""
    [(pixels, _)] = reader.read([ids])
    return pixels
