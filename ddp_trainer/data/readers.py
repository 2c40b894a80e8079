"""Readers of batches: of images in memory, and of a map-style data set, whose samples are read
ahead by threads.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

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

    def __len__(self) -> int:
        return len(self.labels)

    def read(
        self, batches: Iterable[Tensor], crops: Iterable[Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, uint8 [B, C, H, W], and labels, int64 [B], on the device, per batch of ids.
        crops: ignored.
        """
        for ids in batches:
            on_device = ids.to(self.labels.device, non_blocking=True)
            yield self.pixels.index_select(0, on_device), self.labels.index_select(0, on_device)


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

    def __len__(self) -> int:
        return num_samples(self.dataset)

    def read(
        self, batches: Iterable[Tensor], crops: Iterable[Tensor] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, uint8 [B, C, H, W], and labels, int64 [B], on the CPU, for each int64 [B]
        of sample ids.

        A bad image is replaced by `blank`, with the label `NO_LABEL`. crops: for each batch, [B,
        4], the four random numbers in [0, 1) that choose the crop of each image file; None: center
        crops.

        Raises:
            RuntimeError: a sample cannot be read, for a reason other than a bad image.
            ValueError: a sample has another shape than the first sample of the data set, or its
            label is not a class.
        """
        requests = zip(batches, crops or repeat(None), strict=False)
        pending = deque[PendingBatch]()
        ahead = BATCHES_AHEAD if self.num_workers else 0
        # torch's default, a thread for each core, would compete with the other readers and with the
        # training
        pool = ThreadPoolExecutor(max(1, self.num_workers), "reader", torch.set_num_threads, (1,))
        try:
            while True:
                for ids, draws in islice(requests, ahead + 1 - len(pending)):
                    pending.append(self._begin(pool, ids, draws))
                if not pending:
                    return
                images, labels, reads = pending.popleft()
                for read in reads:
                    read.result()
                yield images, labels
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, pool: ThreadPoolExecutor, ids: Tensor, draws: Tensor | None) -> PendingBatch:
        """Start to read a batch; return images, labels and the futures that fill them. draws: its
        crops, see `read`.
        """
        with torch.inference_mode(False):  # because threads outside of it write to the tensors
            # as decoders return images
            shape = (len(ids), *self.image_shape)
            layout = torch.channels_last
            images = torch.empty(
                shape, dtype=torch.uint8, pin_memory=self.pin_memory, memory_format=layout
            )
            labels = torch.empty(len(ids), dtype=torch.int64, pin_memory=self.pin_memory)

        indices = ids.tolist()
        rows = [None] * len(ids) if draws is None else draws.tolist()
        places = range(len(indices))
        label_array = labels.numpy()

        def fill(places: range) -> None:
            for place in places:
                try:
                    images[place], label_array[place] = self.sample(indices[place], rows[place])
                except BadSampleError as error:
                    images[place] = self.blank
                    label_array[place] = NO_LABEL
                    self.bad.append(
                        (sample_name(self.dataset, indices[place]), str(error.__cause__))
                    )

        if not self.num_workers:
            fill(places)
            return images, labels, []
        # waking a thread for each sample would take as long as reading a cached sample
        part = max(1, len(ids) // (PARTS_PER_THREAD * self.num_workers))
        return (
            images,
            labels,
            [pool.submit(fill, places[start : start + part]) for start in places[::part]],
        )

    def sample(self, index: int, draws: Sequence[float] | None = None) -> tuple[Tensor, int]:
        """Return a sample; ValueError if shape or label is wrong. draws: four numbers for the crop;
        None: center.
        """
        image, label = read_sample(self.dataset, index, draws)
        if image.shape != self.image_shape:
            name = sample_name(self.dataset, index)
            shape = list(image.shape)
            first = list(self.image_shape)
            raise ValueError(
                f"{name} has the shape {shape}, the first image {first}: all must have the same"
                " shape"
            )
        if not 0 <= label < self.num_classes:
            name = sample_name(self.dataset, index)
            raise ValueError(
                f"{name} has the label {label}: labels must be 0 to {self.num_classes - 1}"
            )
        return image, label


Reader = ResidentReader | SampleReader


def read_images(reader: Reader, ids: Tensor) -> Tensor:
    """Return the images of some samples, without augmentation: int64 [B] -> uint8 [B, C, H, W]."""
    [(pixels, _)] = reader.read([ids])
    return pixels
