"""Sums of losses and metrics on the device, the digest of samples, the first non-finite step."""

from typing import NoReturn

import torch
from torch import Tensor

from ddp_trainer.distributed.world import World
from ddp_trainer.optim.interfaces import Loss

STEP_STRIDE = 0x1000003
"""In the digest, a sample is ``id + step * STEP_STRIDE``, unique if all ids are less than this."""


def sum_of_losses(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum [] of the losses of a batch; samples without a label do not count.

    logits: float32 [B, C]. labels: int64 [B], negative for a sample without a label; or float32
    [B, C], all zero for such a sample. `loss` gets 0 in place of a negative label.
    Raises RuntimeError if `loss` returns another shape than [B], which would be broadcast.
    """
    is_known = labels >= 0 if labels.ndim == 1 else labels.sum(1) > 0
    losses = loss(logits, labels.clamp(min=0))
    if losses.shape != is_known.shape:
        # not a ConfigError, which all ranks must raise
        raise RuntimeError(
            f"the loss must return one value per sample, {list(is_known.shape)}, and returns"
            f" {list(losses.shape)}"
        )
    return torch.where(is_known, losses, 0).sum()


class MetricSums:
    """Sums over the steps since a log point, on the device, so that the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.vector = torch.zeros(4, dtype=torch.float64, device=device)
        """float64 [4]: sum of losses; number of correct predictions, samples, skipped updates."""

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a microbatch. loss_sum: [], logits: [B, C].

        labels: int64 [B], negative for no label; or float32 [B, C], all zero for no label.
        """
        if labels.ndim == 2:  # mixed images: the class with the largest share is the correct one
            shares, classes = labels.max(1)
            labels = torch.where(shares > 0, classes, -1)
        self.vector[0] += loss_sum
        self.vector[1] += (logits.argmax(1) == labels).sum()
        self.vector[2] += (labels >= 0).sum()

    def add_skipped(self, is_skipped: Tensor) -> None:
        """Count an update as skipped if `is_skipped`, bool [], is true."""
        self.vector[3] += is_skipped


class SampleDigest:
    """A digest of the samples that each step of an epoch used: a sum of hashes.

    Two epochs with equal digests used the same samples in the same global batches, at any world
    size. The digest of an epoch is the sum of the digests of all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._vector = torch.zeros(2, dtype=torch.int64, device=device)
        self._ids: list[Tensor] = []
        self._steps: list[int] = []

    def add(self, ids: Tensor, *, step: int) -> None:
        """Add the samples of step `step` of the epoch.

        ids: int64 [B], indices in the data set, or [S, B] of S steps from `step` on; the shape is
        always the same. They must not change until `vector` is read, which hashes all new samples
        at once.
        """
        self._ids.append(ids)
        self._steps += range(step, step + (len(ids) if ids.ndim == 2 else 1))

    @property
    def vector(self) -> Tensor:
        """int64 [2]: sum of the hashes (wrapping around), number of samples."""
        if self._ids:
            ids = torch.stack(self._ids).flatten(0, -2)
            steps = torch.tensor(self._steps).to(ids.device, non_blocking=True)
            # A hash like splitmix64, but with fewer operations. Its factors are 0x9E3779B97F4A7C15
            # and 0xBF58476D1CE4E5B9, written as the int64 of the same bits.
            mixed = (ids + steps[:, None] * STEP_STRIDE) * -0x61C8864680B583EB
            mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
            self._vector[0] += (mixed ^ (mixed >> 32)).sum()
            self._vector[1] += ids.numel()
            self._ids.clear()
            self._steps.clear()
        return self._vector

    @staticmethod
    def text(total: int) -> str:
        """Return the sum of hashes `total`, an int64, as 16 hexadecimal digits."""
        return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


DIVERGED_FIX = "lower optimizer.lr, or set max_grad_norm"


class DivergedError(RuntimeError):
    """A loss, gradient, weight or logit was infinite or NaN."""

    is_repeatable = True
    """A resumed training repeats its steps exactly, and so this error."""


class NonFinite:
    """Finds on the device, without waiting, the first step with a non-finite loss or gradient."""

    def __init__(self, device: torch.device) -> None:
        self.steps_before = 0  # the number of steps of earlier launches
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=device)
        """int64 []: the number of steps of this launch before the first that is not finite."""
        self.are_all_finite = torch.ones((), dtype=torch.bool, device=device)

    def check(self, value: Tensor) -> None:
        """Count a step whose `value`, [], is finite, unless an earlier one was not."""
        self.are_all_finite &= value.isfinite()
        self.finite_steps += self.are_all_finite

    @property
    def flag(self) -> Tensor:
        """float64 [1]: 1 if any step so far had a value that is not finite, else 0."""
        return (~self.are_all_finite).double()[None]

    def fail(self, world: World, *, lr: float) -> NoReturn:
        """Raise `DivergedError` with `lr` and the first step that is not finite. Collective."""
        finite_steps = min(world.all_gather_object(int(self.finite_steps)))
        step = self.steps_before + finite_steps + 1
        raise DivergedError(
            f"the loss or gradient of step {step} is not finite (lr {lr:g}): {DIVERGED_FIX}, or set"
            " on_nonfinite=skip to leave out updates whose gradients are not finite"
        )
