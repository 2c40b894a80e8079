"""Batches from images that stay in memory, on the device where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_trainer.data.augment import Augmentation
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.data.sources import ImageSet


class Batch(NamedTuple):
    """One rank's share of a global batch."""

    images: Tensor
    """float32 [B, C, H, W], normalised."""
    labels: Tensor
    """int64 [B]."""
    ids: Tensor
    """int64 [B]: which samples of the data set these are."""


class Normalise:
    """Turn uint8 pixels into floats of mean 0 and deviation 1, in the memory layout of the model."""

    def __init__(
        self, mean: list[float], std: list[float], *, device: torch.device, memory_format: torch.memory_format
    ) -> None:
        deviation = torch.tensor(std, device=device)[:, None, None]
        self.scale = 1 / (255 * deviation)
        self.shift = -torch.tensor(mean, device=device)[:, None, None] / deviation
        self.memory_format = memory_format

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels: uint8 [B, C, H, W] -> float32 [B, C, H, W]."""
        images = pixels.to(torch.float32, memory_format=self.memory_format)
        return images.mul_(self.scale).add_(self.shift)


class ResidentLoader:
    """Training batches by index from memory, cropped, mirrored and erased as whole batches.

    Iterating yields this rank's batches of the sampler's epoch, from its cursor on.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        sampler: GlobalBatchSampler,
        augmentation: Augmentation,
        normalise: Normalise,
        device: torch.device,
    ) -> None:
        self.sampler, self.augmentation, self.normalise, self.device = (
            sampler,
            augmentation,
            normalise,
            device,
        )
        self.pixels = augmentation.pad(images.images).to(device)
        self.labels = images.labels.to(device)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that come out."""
        return self.pixels.shape[1], self.augmentation.height, self.augmentation.width

    def __iter__(self) -> Iterator[Batch]:
        sampler, augmentation = self.sampler, self.augmentation
        order = sampler.order().to(self.device)
        draws = augmentation.draw(len(order), epoch=sampler.epoch).to(self.device)
        for step in range(sampler.step, sampler.steps_per_epoch):
            mine = sampler.positions(step)
            ids, changes = order[mine], draws.at(mine)
            images = self.normalise(augmentation.crop(self.pixels, ids, changes))
            yield Batch(augmentation.erase(images, changes), self.labels[ids], ids)


class EvaluationLoader:
    """Each sample of the evaluation split once, over all ranks: rank r takes every W-th from r, unpadded."""

    def __init__(
        self,
        images: ImageSet,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        normalise: Normalise,
        device: torch.device,
    ) -> None:
        self.pixels = images.images[rank::world_size].to(device)
        self.labels = images.labels[rank::world_size].to(device)
        self.ids = torch.arange(len(images), device=device)[rank::world_size]  # none for a rank past the last sample
        self.normalise = normalise
        self.local_batch_size = max(1, batch_size // world_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.labels), self.local_batch_size):
            part = slice(start, start + self.local_batch_size)
            yield Batch(self.normalise(self.pixels[part]), self.labels[part], self.ids[part])
