"""Reads batches from a map-style data set: threads read the samples in advance."""

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
    BadImageError,
    Shape,
    num_samples,
    read_sample,
    sample_name,
)
from ddp_trainer.data.read_ahead import read_ahead
from ddp_trainer.distributed.world import record_progress

BATCHES_AHEAD = 2
"""Number of batches that threads read before they are needed."""
PARTS_PER_THREAD = 4
"""Number of parts per thread into which the samples of a batch are divided."""
NO_LABEL = -100
"""The label of a bad sample (`BadImageError`): the default of ignore_index in cross_entropy."""
PendingBatch = tuple[Tensor, Tensor, list[Future[None]]]
"""Images, labels, and the futures of the threads that still write to these tensors."""


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Reads batches of samples in order, at most `BATCHES_AHEAD` batches in advance."""

    dataset: Dataset[Any]
    image_shape: Shape
    num_classes: int
    num_workers: int
    """Number of reading threads; 0: the calling thread reads, without reading in advance."""
    pin_memory: bool = False
    blank: Tensor | float = 0
    """The color of the image that replaces a bad sample: uint8 [C, 1, 1], or one number."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """(name, reason) of each bad sample; the reader appends to this list."""
    device: ClassVar = torch.device("cpu")
    """The device to which the ids of samples are copied before `read`."""

    @property
    def ahead(self) -> int:
        """The number of batches that are read in advance."""
        return BATCHES_AHEAD if self.num_workers else 0

    def __len__(self) -> int:
        return num_samples(self.dataset)

    def read(
        self, batches: Iterable[Tensor], crops: Iterable[Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, uint8 [B, C, H, W], and labels, int64 [B], on the CPU.

        The image of a bad sample is replaced by `blank`, and its label by `NO_LABEL`.

        batches: the ids of each batch, int64 [B]. crops: for each batch, float32 [B, 4], the four
        random numbers in [0, 1) that choose the crop of each image; None: center crops.

        Raises:
            RuntimeError: a sample cannot be read, for another reason than `BadImageError`.
            ValueError: an image is not uint8 or has another shape than `image_shape`, or its label
                is not a class.
        """
        requests = zip(batches, repeat(None) if crops is None else crops, strict=False)
        begun = read_ahead(self._begin, requests, num_threads=self.num_workers, ahead=self.ahead)
        with closing(begun):  # because a traceback would keep the generator and its threads alive
            for images, labels, parts in begun:
                for part in parts:
                    part.result()
                yield images, labels

    # because inference tensors would reject the writes of threads, which have no inference mode
    @torch.inference_mode(False)
    def _begin(
        self, pool: ThreadPoolExecutor, request: tuple[Tensor, Tensor | None]
    ) -> PendingBatch:
        """Start to read a batch; without threads, read it. request: ids and crops, see `read`."""
        ids, crops = request
        images = torch.empty(
            (len(ids), *self.image_shape),
            dtype=torch.uint8,
            pin_memory=self.pin_memory,
            memory_format=torch.channels_last,  # because decoders return this format
        )
        labels = torch.empty(len(ids), dtype=torch.int64, pin_memory=self.pin_memory)
        draws = repeat(None) if crops is None else crops.tolist()
        samples = list(enumerate(zip(ids.tolist(), draws, strict=False)))
        label_array = labels.numpy()  # because writing to a tensor takes 30 times as long

        def fill(part: list[tuple[int, tuple[int, Any]]]) -> None:
            for row, (index, numbers) in part:
                images[row], label_array[row] = self._read(index, numbers)
                record_progress()  # because a batch from a slow disk may take minutes

        if not self.num_workers:
            fill(samples)
            return images, labels, []
        # A part has several samples, because waking a thread takes as long as reading one sample
        # from the cache.
        size = max(1, len(samples) // (PARTS_PER_THREAD * self.num_workers))
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        return images, labels, [pool.submit(fill, part) for part in parts]

    def _read(self, index: int, draws: Sequence[float] | None) -> tuple[Tensor | float, int]:
        """Return image and label of sample `index`; `blank` and `NO_LABEL` if the sample is bad.

        A bad sample is also added to `bad`. draws: four numbers that choose the crop; None: the
        center crop. Raises: see `read`.
        """
        try:
            image, label = read_sample(self.dataset, index, draws)
        except RuntimeError as error:
            if not isinstance(error.__cause__, BadImageError):
                raise
            self.bad.append((sample_name(self.dataset, index), str(error.__cause__)))
            return self.blank, NO_LABEL

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
