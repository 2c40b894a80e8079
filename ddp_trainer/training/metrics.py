"""Sums of metrics on the device, the digest of samples, and the first value that is not finite."""

from typing import NoReturn

import torch
from torch import Tensor

from ddp_trainer.distributed.world import World


class MetricSums:
    """Sums of losses and correct predictions, kept on the device, so that no step waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.vector = torch.zeros(3, dtype=torch.float64, device=device)
        """float64 [3]: sum of losses, number of correct predictions, number of samples."""

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch. loss_sum: [], logits: [B, C].

        labels: int64 [B], negative for no label; or float [B, C], 0 for no label.
        """
        if labels.ndim == 2:  # mixed images: the class with the largest share is the correct one
            shares, classes = labels.max(1)
            labels = torch.where(shares > 0, classes, -1)
        self.vector[0] += loss_sum
        self.vector[1] += (logits.argmax(1) == labels).sum()
        self.vector[2] += (labels >= 0).sum()


class SampleDigest:
    """A digest of the samples that each step of an epoch used: a sum of hashes.

    Two epochs with equal digests used the same samples in the same global batches, whatever the
    world size. The digests of ranks can be added.
    """

    def __init__(self, device: torch.device) -> None:
        self.vector = torch.zeros(2, dtype=torch.int64, device=device)
        """int64 [2]: sum of the hashes (wrapping around), number of samples."""

    def add(self, ids: Tensor, *, step: int) -> None:
        """Add the samples of step `step` of the epoch. ids: int64 [B], positions in the data."""
        # splitmix64, with arithmetic shifts; the first factor is the golden ratio's.
        mixed = (ids + step * 0x1000003) * -0x61C8864680B583EB
        mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
        self.vector[0] += (mixed ^ (mixed >> 32)).sum()
        self.vector[1] += len(ids)

    @staticmethod
    def text(total: int) -> str:
        """Return the sum of hashes `total`, an int64, as 16 hexadecimal digits."""
        return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


class DivergedError(RuntimeError):
    """A loss or gradient was not finite."""


class NonFinite:
    """Records the first step whose loss or gradient is not finite, without waiting."""

    NEVER = 2**62

    def __init__(self, device: torch.device) -> None:
        self.first = torch.full((), self.NEVER, dtype=torch.int64, device=device)
        """int64 []: the first step with a value that is not finite, or NEVER."""

    def check(self, value: Tensor, *, step: int) -> None:
        """Record optimizer step `step` if `value`, [], is not finite and no step is recorded."""
        self.first = torch.where(value.isfinite(), self.first, self.first.clamp(max=step))

    @property
    def flag(self) -> Tensor:
        """float64 [1]: 1 if any step so far had a value that is not finite, else 0."""
        return (self.first < self.NEVER).double()[None]

    def fail(self, world: World, *, lr: float) -> NoReturn:
        """Raise `DivergedError`, which names `lr` and the first such step. Collective."""
        step = min(world.all_gather_object(int(self.first)))
        raise DivergedError(
            f"the loss or gradient of step {step} is not finite (lr {lr:g}): lower optimizer.lr, "
            "set max_grad_norm, or set on_nonfinite=skip to leave such updates out"
        )
