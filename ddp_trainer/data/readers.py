"""Readers of batches: of images in memory, and of a map-style data set, whose samples are read ahead by threads."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.data.dataset import ImageTensors, num_samples, read_sample, sample_name

BATCHES_AHEAD = 2

Sample = tuple[Tensor, int]


class ResidentReader:
    """Reads batches of images that stay in memory, on the device where there is one."""

    def __init__(self, images: ImageTensors, *, device: torch.device) -> None:
        self.pixels, self.labels = images.images.to(device), images.labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 [B, C, H, W] and int64 [B], on the device, for each int64 [B] of sample ids."""
        for ids in batches:
            on_device = ids.to(self.labels.device, non_blocking=True)
            yield self.pixels[on_device], self.labels[on_device]


class SampleReader:
    """Reads batches of samples in order, at most `BATCHES_AHEAD` of them before they are asked for."""

    def __init__(
        self, dataset: Dataset[Any], *, image_shape: tuple[int, int, int], num_classes: int, num_workers: int
    ) -> None:
        self.dataset, self.image_shape = dataset, image_shape
        self.num_classes, self.num_workers = num_classes, num_workers

    def __len__(self) -> int:
        return num_samples(self.dataset)

    def read(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 [B, C, H, W] and int64 [B], on the CPU, for each int64 [B] of sample ids.

        Raises:
            RuntimeError: a sample cannot be read.
            ValueError: a sample has another shape than the first of the data set, or a label that is no class.
        """
        batches, pending = iter(batches), deque[list[Future[Sample]]]()
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="reader")
        try:
            while True:
                for ids in islice(batches, BATCHES_AHEAD + 1 - len(pending)):
                    pending.append([pool.submit(self.sample, index) for index in ids.tolist()])
                if not pending:
                    return
                samples = [future.result() for future in pending.popleft()]
                yield torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def sample(self, index: int) -> Sample:
        """Return a sample after checking its shape and its label."""
        image, label = read_sample(self.dataset, index)
        name = sample_name(self.dataset, index)
        if image.shape != self.image_shape:
            raise ValueError(
                f"{name} has the shape {list(image.shape)} and the first one {list(self.image_shape)}: all images "
                "must have the same"
            )
        if not 0 <= label < self.num_classes:
            raise ValueError(f"{name} has the label {label}: labels must be 0 to {self.num_classes - 1}")
        return image, label


Reader = ResidentReader | SampleReader
