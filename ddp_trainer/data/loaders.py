"""The loaders of a run: batches of this rank, augmented and normalized on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_trainer.config.data import DataConfig
from ddp_trainer.data.augmentation import Augmentation, AugmentationParams
from ddp_trainer.data.dataset import Datasets, ImageTensors, Shape, Split, in_whole
from ddp_trainer.data.images.decoding import CENTER
from ddp_trainer.data.images.image_files import ImageFiles
from ddp_trainer.data.mixing import Mixing, build_mixing
from ddp_trainer.data.readers import Reader, ResidentReader, SampleReader
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.distributed.environment import usable_cores
from ddp_trainer.distributed.process_group import World


class Batch(NamedTuple):
    """One rank's share of a global batch."""

    images: Tensor
    """float32 [B, C, H, W], normalized."""
    labels: Tensor
    """int64 [B], `NO_LABEL` for a sample that could not be read. With mixup or CutMix: float32 [B,
    classes].
    """
    ids: Tensor
    """int64 [B]: the positions of the samples in the data set."""


class Normalize:
    """Converts uint8 pixels to floats of mean 0 and standard deviation 1, in the memory format of
    the model.
    """

    def __init__(
        self,
        mean: list[float],
        std: list[float],
        *,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> None:
        deviation = torch.tensor(std, device=device)
        self.scale = 1 / (255 * deviation)
        self.shift = -torch.tensor(mean, device=device) / deviation
        self.memory_format = memory_format

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return the normalized images. pixels: uint8 [B, C, H, W] -> float32 [B, C, H, W]."""
        images = pixels.to(torch.float32, memory_format=self.memory_format)
        # by rows, because a CPU is slow over a last dimension of 3
        if self.memory_format is torch.channels_last:
            batch, channels, height, width = images.shape
            rows = images.permute(0, 2, 3, 1).view(batch, height, width * channels)
            rows.mul_(self.scale.expand(channels).repeat(width)).add_(
                self.shift.expand(channels).repeat(width)
            )
            return images
        return images.mul_(self.scale[:, None, None]).add_(self.shift[:, None, None])


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
        device = self.device
        order = sampler.order()
        on_device = order.to(device)
        params = self.augmentation.draw(len(order), epoch=sampler.epoch)
        crops = params.crops
        params = params.to(device)
        steps = range(sampler.step, sampler.steps_per_epoch)
        shares = self.positions(steps)
        shares_on_device = shares if isinstance(shares, list) else shares.to(device)
        is_resident = isinstance(self.reader, ResidentReader)
        ids, places = (on_device, shares_on_device) if is_resident else (order, shares)
        batches = self.reader.read(
            (ids[place] for place in places),
            None if crops is None else (crops[share] for share in shares),
        )
        for step, share, (pixels, labels) in zip(steps, shares_on_device, batches, strict=True):
            images = self.augment(pixels.to(device, non_blocking=True), params.at(share), step=step)
            labels = labels.to(device, non_blocking=True)
            if self.mixing is not None:
                images, labels = self.mix(self.mixing, images, labels, step=step)
            yield Batch(images, labels, on_device[sampler.positions(step)])

    def positions(self, steps: range) -> list[slice] | Tensor:
        """Return, for each of `steps`, the positions in the epoch's order of the samples that this
        rank reads.

        With mixup or CutMix and more than one rank, they are int64 [steps, 2 · B]: the B positions
        of this rank's samples, then the positions of the samples to mix them with. Else, they are
        one slice for each step.
        """
        sampler = self.sampler
        if self.mixing is None or sampler.num_replicas == 1:
            return [sampler.positions(step) for step in steps]
        size = sampler.global_batch_size
        places = torch.arange(sampler.rank, size, sampler.num_replicas)
        return torch.tensor(steps)[:, None] * size + torch.cat([places, (places + 1) % size])

    def augment(self, pixels: Tensor, params: AugmentationParams, *, step: int) -> Tensor:
        """Return images of the epoch's global batch `step`, augmented and normalized: uint8 [B, C,
        H, W] -> float32.
        """
        augmentation = self.augmentation
        cropped = augmentation.crop(augmentation.pad(pixels), params)
        changed = augmentation.transform(cropped, epoch=self.sampler.epoch, step=step)
        return augmentation.erase(self.normalize(changed), params)

    def mix(
        self, mixing: Mixing, images: Tensor, labels: Tensor, *, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return each image and its label mixed with the next one in global batch `step`, and the
        last with the first.

        With one rank, `images` and `labels` are the whole batch; else this rank's samples, then
        those to mix them with.
        """
        if self.sampler.num_replicas == 1:
            images, labels = (torch.cat([part, part.roll(-1, 0)]) for part in (images, labels))
        return mixing.apply(images, labels, mixing.draw(epoch=self.sampler.epoch, step=step))


class EvaluationLoader:
    """Yields each sample of the evaluation split once, without padding: rank r of W takes every
    W-th from r on.
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
            pixels, labels, ids = (
                part.to(self.device, non_blocking=True) for part in (pixels, labels, ids)
            )
            yield Batch(self.normalize(pixels), labels, ids)


@dataclass(frozen=True, slots=True)
class Loaders:
    """The two loaders of a run, and a description of their data."""

    train: TrainLoader
    eval: EvaluationLoader
    image_shape: Shape
    class_names: list[str]
    preprocessing: dict[str, Any]
    """The preprocessing of a model's input, as it is saved in checkpoints."""
    fingerprint: str
    """A digest of the samples of both splits."""
    bad_samples: list[tuple[str, str]]
    """Name and reason of each bad image of this rank; readers append to it, and `BadSamples.gather`
    empties it.
    """

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
    size = {"height": shape[1], "width": shape[2], "seed": seed}
    normalize = Normalize(config.mean, config.std, device=world.device, memory_format=memory_format)
    bad_samples: list[tuple[str, str]] = []
    train, evaluation = (
        build_reader(
            split, config, image_shape=shape, num_classes=num_classes, world=world, bad=bad_samples
        )
        for split in (datasets.train, datasets.eval)
    )
    sampler = GlobalBatchSampler(
        train,
        global_batch_size=global_batch_size,
        num_replicas=world.world_size,
        rank=world.rank,
        seed=seed,
    )
    mixing = build_mixing(config.augment, num_classes=num_classes, **size)
    return Loaders(
        train=TrainLoader(
            train,
            sampler,
            Augmentation(config.augment, **size),
            normalize,
            device=world.device,
            mixing=mixing,
        ),
        eval=EvaluationLoader(evaluation, normalize, world, batch_size=eval_batch_size),
        image_shape=shape,
        class_names=list(datasets.class_names),
        preprocessing={
            "mean": config.mean,
            "std": config.std,
            "image_shape": list(shape),
            "center_crop": CENTER
            if isinstance(in_whole(datasets.eval, 0)[0], ImageFiles)
            else None,
        },
        fingerprint=datasets.fingerprint,
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
    """Return the reader of a split, which appends the name and reason of each sample that it cannot
    read to `bad`.
    """
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
    """Return the number of threads that read: `num_workers`, or for auto one per usable core of a
    rank, 2 to 16.
    """
    if isinstance(num_workers, int):
        return num_workers
    return min(16, max(2, usable_cores() // local_world_size))
