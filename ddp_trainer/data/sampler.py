"""The order of samples: global batches that do not depend on the world size."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ddp_trainer.distributed.seeding import generator


class GlobalBatchSampler(DistributedSampler[int]):
    """Gives each rank its share of every global batch of an epoch.

    Global batch k of an epoch is ``order[k*G:(k+1)*G]``, where ``order`` depends on (seed, epoch)
    alone. Rank r of W takes every W-th position in the batch from r on; if G is not divisible by W,
    shares differ by one sample. The last incomplete global batch of an epoch is dropped. Iterating
    starts at global batch `step`.

    A ``DataLoader`` with this sampler needs ``batch_size=sampler.local_batch_size``.
    """

    def __init__(self, dataset: Sized, *, global_batch_size: int, **options: Any) -> None:
        """options: num_replicas, rank, shuffle and seed, as for `DistributedSampler`."""
        super().__init__(dataset, drop_last=True, **options)  # type: ignore[arg-type]
        self.length = len(dataset)
        self.global_batch_size = global_batch_size
        self.step = 0
        assert self.num_replicas <= global_batch_size <= self.length

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in a whole epoch."""
        return self.length // self.global_batch_size

    @property
    def local_batch_size(self) -> int:
        """The number of samples of each global batch that this rank takes."""
        return len(range(self.rank, self.global_batch_size, self.num_replicas))

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Set the epoch, and the global batch at which iterating then starts."""
        super().set_epoch(epoch)
        self.step = step

    def order(self) -> Tensor:
        """Return the sample ids of the whole epoch in order: int64 [N]."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(
            self.length, generator=generator(self.seed, epoch=self.epoch, purpose="order")
        )

    def positions(self) -> Tensor:
        """Return the positions, in the order, of this rank's samples: int64 [steps, B].

        A row has the samples of one global batch, from `step` on.
        """
        starts = torch.arange(self.step, self.steps_per_epoch) * self.global_batch_size
        return starts[:, None] + torch.arange(self.rank, self.global_batch_size, self.num_replicas)

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        yield from self.order()[self.positions()].flatten().tolist()

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.step) * self.local_batch_size
