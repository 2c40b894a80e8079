"""The loaders of a run: they yield this rank's batches, augmented and normalized on the device."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ddp_trainer.data.augmentation import Augmentation, Normalize
from ddp_trainer.data.dataset import Datasets, ImageTensors
from ddp_trainer.data.mixing import draw_mix, mix_pairs
from ddp_trainer.data.readers import SampleReader
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.distributed.world import World


class ResidentReader:
    """Reads batches of images that stay in the memory of `device`."""

    def __init__(self, images: ImageTensors, *, device: torch.device) -> None:
        self.pixels = images.images.to(device)
        self.labels = images.labels.to(device)
        self.device = device
        """The device to which the ids of samples are copied before `read`."""

    ahead: ClassVar = 0

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


Reader = ResidentReader | SampleReader


def read_images(reader: Reader, ids: Tensor) -> Tensor:
    """Return the images of the samples `ids`, not augmented: int64 [B] -> uint8 [B, C, H, W]."""
    [(pixels, _)] = reader.read([ids])
    return pixels


class Batch(NamedTuple):
    """One rank's share of a global batch."""

    images: Tensor
    """float32 [B, C, H, W], normalized."""
    labels: Tensor
    """int64 [B], `NO_LABEL` for a bad sample. Mixed images: probabilities, float32 [B, classes]."""
    ids: Tensor
    """int64 [B]: the indices of the samples in the split."""


@dataclass(frozen=True, slots=True)
class TrainLoader:
    """Yields this rank's training batches of the sampler's epoch, from `sampler.step` on.

    Each augmentation is one operation on a whole batch.
    """

    reader: Reader
    sampler: GlobalBatchSampler
    augmentation: Augmentation
    normalize: Normalize
    device: torch.device
    num_classes: int

    def __iter__(self) -> Iterator[Batch]:
        ids, params = self.draw_epoch()
        return self.read(ids, params, range(len(ids)))

    def read(
        self, ids: Tensor, params: dict[str, Tensor], rows: Iterable[int], *, num_shares: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of the rows `rows` of `ids` and `params`, which `draw_epoch` returns.

        rows: numbers, of which the reader takes some in advance. num_shares: rows per global batch.
        """
        first_step = self.sampler.step
        read_rows, crop_rows, rows = tee(rows, 3)
        reader_ids = ids.to(self.reader.device)
        params = dict(params)
        crops = params.pop("crops", None)
        batches = self.reader.read(
            (reader_ids[row] for row in read_rows),
            None if crops is None else (crops[row] for row in crop_rows),
        )

        # Ids and random parameters of the epoch are copied to the device at once, because a copy in
        # each step would make the host wait.
        own_ids = ids[:, : self.sampler.local_batch_size].to(self.device)
        params = {name: values.to(self.device) for name, values in params.items()}
        for (pixels, labels), row in zip(batches, rows, strict=False):
            images, labels = self.augment(
                pixels.to(self.device, non_blocking=True),
                labels.to(self.device, non_blocking=True),
                {name: values[row] for name, values in params.items()},
                step=first_step + row // num_shares,
            )
            yield Batch(images, labels, own_ids[row])

    def draw_epoch(self, shares: Sequence[range] = ()) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the ids of this rank's samples and the parameters of `Augmentation.draw` for them.

        Both are on the CPU and have a row for each remaining batch of the epoch: [steps, B, …]. If
        images are mixed and there are several ranks, B then counts the samples to mix with too.
        shares: see `GlobalBatchSampler.positions`.
        """
        sampler = self.sampler
        order = sampler.order()
        positions = sampler.positions(shares)
        if self.augmentation.is_mixing and sampler.num_replicas > 1:
            # [steps, 2 · B]: this rank's samples, then the samples to mix them with
            size = sampler.global_batch_size
            partners = positions // size * size + (positions + 1) % size
            positions = torch.cat([positions, partners], dim=1)
        params = {
            name: values[positions]
            for name, values in self.augmentation.draw(len(order), epoch=sampler.epoch).items()
        }
        return order[positions], params

    def augment(
        self, pixels: Tensor, labels: Tensor, params: dict[str, Tensor], *, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's images of global batch `step`, float32 [B, C, H, W], and the labels.

        pixels: uint8 [B, C, H, W]. params: the rows of `Augmentation.draw` for `pixels`.

        With mixup or CutMix, each image is mixed with the next image of the global batch, and the
        last with the first. If there are several ranks, `pixels` and `labels` then have the length
        2 · B: this rank's images, then the images to mix them with.
        """
        epoch = self.sampler.epoch
        cropped = self.augmentation.crop(pixels, params)
        changed = self.augmentation.transform(cropped, epoch=epoch, step=step)
        images = self.augmentation.erase(self.normalize(changed), params)
        if not self.augmentation.is_mixing:
            return images, labels
        if self.sampler.num_replicas == 1:
            images = torch.cat([images, images.roll(-1, 0)])
            labels = torch.cat([labels, labels.roll(-1, 0)])
        mix = draw_mix(self.augmentation, epoch=epoch, step=step)
        return mix_pairs(images, labels, mix, num_classes=self.num_classes)


@dataclass(frozen=True, slots=True)
class EvaluationLoader:
    """Yields this rank's batches of the evaluation split.

    Rank r of W takes every W-th sample, from sample r on, or every W-th whole batch. All ranks
    together yield each sample once, so the number of batches may differ between ranks.
    """

    reader: Reader
    normalize: Normalize
    world: World
    batch_size: int
    """Number of samples in a batch, summed over all ranks unless `are_batches_whole`."""
    are_batches_whole: bool = False
    """Whether a batch is that of one rank, so that batches do not depend on the number of ranks."""

    def __iter__(self) -> Iterator[Batch]:
        device = self.world.device
        rank = self.world.rank
        ranks = self.world.world_size
        ids = torch.arange(len(self.reader))
        if self.are_batches_whole:
            parts = ids.split(self.batch_size)[rank::ranks]
        else:
            own_ids = ids[rank::ranks]
            # A rank may have no sample; split would then return one empty batch.
            parts = own_ids.split(max(1, self.batch_size // ranks)) if len(own_ids) else ()
        for ids, (pixels, labels) in zip(parts, self.reader.read(parts), strict=True):
            images = self.normalize(pixels.to(device, non_blocking=True))
            labels = labels.to(device, non_blocking=True)
            yield Batch(images, labels, ids.to(device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class Loaders:
    """The two loaders of a run, and the data sets that they read."""

    train: TrainLoader
    eval: EvaluationLoader
    datasets: Datasets
    preprocessing: dict[str, Any]
    """Mean, std, image shape and center crop of the model's input, for checkpoints."""
    bad_samples: list[tuple[str, str]]
    """(name, reason) of each bad sample that this rank has read; readers append to this list."""

    @property
    def sampler(self) -> GlobalBatchSampler:
        """The sampler of the training batches."""
        return self.train.sampler
