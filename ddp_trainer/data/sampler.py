"""The order of samples: global batches that do not depend on the world size."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ddp_trainer.data.sampling import Draw
from ddp_trainer.distributed.seeding import generator


class GlobalBatchSampler(DistributedSampler[int]):
    """Gives each rank its share of every global batch of an epoch.

    Global batch k of an epoch is ``order[k*G:(k+1)*G]``, where G is `global_batch_size`, and
    ``order`` depends on (seed, epoch) alone. Rank r of W takes every W-th sample of the batch, from
    sample r on, unless it has another `share`. If G is not divisible by W, shares differ by one
    sample. An incomplete last batch is dropped. Iterating yields the ids of this rank's samples,
    from global batch `step` on.

    A ``DataLoader`` with this sampler needs ``batch_size=sampler.local_batch_size``.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int,
        share: range | None = None,
        draw: Draw | None = None,
    ) -> None:
        """length: the number of samples in the split. share: positions in a global batch.

        draw: how often each sample is drawn; None: once.
        """
        dataset: Any = range(length)
        super().__init__(dataset, world_size, rank, seed=seed, drop_last=True)
        self.length = length
        self.global_batch_size = global_batch_size
        self.share = share or range(rank, global_batch_size, world_size)
        self.draw = draw
        self.step = 0

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in a whole epoch."""
        return self.length // self.global_batch_size

    @property
    def local_batch_size(self) -> int:
        """The number of samples that this rank takes from each global batch."""
        return len(self.share)

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """Set the epoch, and `step`, the first global batch of the next iteration."""
        super().set_epoch(epoch)
        self.step = step

    def order(self) -> Tensor:
        """Return the sample ids of the whole epoch in order: int64 [N]."""
        random = generator(self.seed, epoch=self.epoch, purpose="order")
        if self.draw is not None:
            return self.draw.order(random)
        return torch.randperm(self.length, generator=random)

    def global_batches(self) -> Tensor:
        """Return the sample ids of each global batch of the epoch: int64 [steps, G]."""
        steps = self.steps_per_epoch
        return self.order()[: steps * self.global_batch_size].view(steps, -1)

    def positions(self, shares: Sequence[range] = ()) -> Tensor:
        """Return the positions in ``order()`` of this rank's samples: int64 [steps, B].

        Each row is for one global batch; the first row is for global batch `step`.
        shares: positions in a global batch, in place of this rank's; each global batch then has one
        row for each of them, [steps · shares, B].
        """
        starts = torch.arange(self.step, self.steps_per_epoch) * self.global_batch_size
        places = torch.tensor([list(share) for share in shares or (self.share,)])
        return (starts[:, None, None] + places).flatten(0, 1)

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        yield from self.order()[self.positions()].flatten().tolist()

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.step) * self.local_batch_size
