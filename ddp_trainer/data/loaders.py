"""The loaders of a run: batches of this rank, augmented and normalized on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_trainer.config.data import DataConfig
from ddp_trainer.data.augmentation import Augmentation
from ddp_trainer.data.dataset import (
    Datasets,
    ImageTensors,
    Shape,
    Split,
    member,
)
from ddp_trainer.data.mixing import Mixing, build_mixing
from ddp_trainer.data.normalize import Normalize
from ddp_trainer.data.readers import Reader, ResidentReader, SampleReader
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.distributed.world import World
from ddp_trainer.runtime import usable_cores


class Batch(NamedTuple):
    """One rank's share of a global batch."""

    images: Tensor
    """float32 [B, C, H, W], normalized."""
    labels: Tensor
    """int64 [B], `NO_LABEL` for a bad sample; with mixup or CutMix: float32 [B, classes]."""
    ids: Tensor
    """int64 [B]: the positions of the samples in the data set."""


@dataclass(frozen=True, slots=True)
class TrainLoader:
    """Training batches: whole batches are cropped, mirrored, erased and mixed at once.

    Iterating yields this rank's batches of the sampler's epoch, from `sampler.step` on.
    """

    reader: Reader
    sampler: GlobalBatchSampler
    augmentation: Augmentation
    normalize: Normalize
    device: torch.device
    mixing: Mixing | None = None

    def __iter__(self) -> Iterator[Batch]:
        sampler = self.sampler
        first_step = sampler.step
        order = sampler.order()
        positions = self.positions()
        params = {
            name: values[positions]
            for name, values in self.augmentation.draw(len(order), epoch=sampler.epoch).items()
        }
        ids = order[positions]
        batches = self.reader.read(ids.to(self.reader.device), params.pop("crops", None))

        # Ids and random parameters of the epoch are copied to the device at once, because a copy in
        # each step would make the host wait.
        own_ids = ids[:, : sampler.local_batch_size].to(self.device)
        params = {name: values.to(self.device) for name, values in params.items()}
        for row, (pixels, labels) in enumerate(batches):
            step = first_step + row
            images = self.augment(
                pixels.to(self.device, non_blocking=True),
                {name: values[row] for name, values in params.items()},
                step,
            )
            labels = labels.to(self.device, non_blocking=True)
            if self.mixing is not None:
                images, labels = self.mix(self.mixing, images, labels, step)
            yield Batch(images, labels, own_ids[row])

    def positions(self) -> Tensor:
        """Return the positions, in the epoch's order, of the samples to read: int64 [steps, B].

        With mixup or CutMix and more than one rank, they are int64 [steps, 2 · B]: this rank's
        samples, then the samples to mix them with.
        """
        positions = self.sampler.positions()
        if self.mixing is None or self.sampler.num_replicas == 1:
            return positions
        size = self.sampler.global_batch_size
        partners = positions // size * size + (positions + 1) % size
        return torch.cat([positions, partners], dim=1)

    def augment(self, pixels: Tensor, params: dict[str, Tensor], step: int) -> Tensor:
        """Return images of the epoch's global batch `step`, augmented and normalized.

        pixels: uint8 [B, C, H, W] -> float32 [B, C, H, W].
        """
        augmentation = self.augmentation
        cropped = augmentation.crop(pixels, params)
        changed = augmentation.transform(cropped, epoch=self.sampler.epoch, step=step)
        return augmentation.erase(self.normalize(changed), params)

    def mix(
        self, mixing: Mixing, images: Tensor, labels: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return images and labels, each mixed with the next one in global batch `step`.

        The last one is mixed with the first. With one rank, `images` and `labels` are the whole
        batch; else this rank's samples, then those to mix them with.
        """
        if self.sampler.num_replicas == 1:
            images = torch.cat([images, images.roll(-1, 0)])
            labels = torch.cat([labels, labels.roll(-1, 0)])
        return mixing.apply(images, labels, mixing.draw(epoch=self.sampler.epoch, step=step))


class EvaluationLoader:
    """Yields each sample of the evaluation split once, without padding.

    Rank r of W takes every W-th sample from r on.
    """

    def __init__(
        self, reader: Reader, normalize: Normalize, world: World, *, batch_size: int
    ) -> None:
        self.reader = reader
        self.normalize = normalize
        self.device = world.device
        # empty if rank >= samples
        self.ids = torch.arange(len(reader))[world.rank :: world.world_size]
        self.local_batch_size = max(1, batch_size // world.world_size)

    def __iter__(self) -> Iterator[Batch]:
        parts = self.ids.split(self.local_batch_size) if len(self.ids) else ()
        for ids, (pixels, labels) in zip(parts, self.reader.read(parts), strict=True):
            images = self.normalize(pixels.to(self.device, non_blocking=True))
            labels = labels.to(self.device, non_blocking=True)
            yield Batch(images, labels, ids.to(self.device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Loaders:
    """The two loaders of a run, and their data."""

    train: TrainLoader
    eval: EvaluationLoader
    datasets: Datasets
    preprocessing: dict[str, Any]
    """The preprocessing of a model's input, as it is saved in checkpoints."""
    bad_samples: list[tuple[str, str]]
    """Name and reason of each bad image of this rank, to which readers append."""

    @property
    def sampler(self) -> GlobalBatchSampler:
        """The sampler of the training batches."""
        return self.train.sampler


def build_loaders(
    datasets: Datasets,
    config: DataConfig,
    *,
    world: World,
    seed: int,
    global_batch_size: int,
    eval_batch_size: int,
    memory_format: torch.memory_format,
) -> Loaders:
    """Return the loaders of this rank for the two splits."""
    shape = datasets.image_shape
    num_classes = len(datasets.class_names)
    bad_samples: list[tuple[str, str]] = []

    def reader(split: Split) -> Reader:
        return build_reader(
            split, config, image_shape=shape, num_classes=num_classes, world=world, bad=bad_samples
        )

    normalize = Normalize(config.mean, config.std, device=world.device, memory_format=memory_format)
    size = {"height": shape[1], "width": shape[2], "seed": seed}
    train = reader(datasets.train)
    sampler = GlobalBatchSampler(
        train,
        global_batch_size=global_batch_size,
        num_replicas=world.world_size,
        rank=world.rank,
        seed=seed,
    )
    return Loaders(
        train=TrainLoader(
            train,
            sampler,
            augmentation=Augmentation(config.augment, **size),
            normalize=normalize,
            device=world.device,
            mixing=build_mixing(config.augment, num_classes=num_classes, **size),
        ),
        eval=EvaluationLoader(reader(datasets.eval), normalize, world, batch_size=eval_batch_size),
        datasets=datasets,
        preprocessing={
            "mean": config.mean,
            "std": config.std,
            "image_shape": list(shape),
            "center_crop": member(datasets.eval, "center_crop"),
        },
        bad_samples=bad_samples,
    )


def build_reader(
    split: Split,
    config: DataConfig,
    *,
    image_shape: Shape,
    num_classes: int,
    world: World,
    bad: list[tuple[str, str]],
) -> Reader:
    """Return the reader of a split. bad: the reader appends name and reason of each bad sample."""
    if isinstance(split, ImageTensors):
        return ResidentReader(split, device=world.device)
    return SampleReader(
        split,
        image_shape=image_shape,
        num_classes=num_classes,
        num_workers=num_readers(config.num_workers, local_world_size=world.local_world_size),
        pin_memory=world.device.type == "cuda",
        blank=torch.tensor(config.mean).mul(255).round().to(torch.uint8)[:, None, None],
        bad=bad,
    )


def num_readers(num_workers: int | str, *, local_world_size: int) -> int:
    """Return the number of threads that read; for auto, 2 to 16: one per usable core of a rank."""
    if isinstance(num_workers, int):
        return num_workers
    return min(16, max(2, usable_cores() // local_world_size))
