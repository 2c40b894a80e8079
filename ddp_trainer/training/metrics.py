"""Sums of metrics, the progress over all launches, and the checks that values are finite and
replicas equal.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.process_group import World


class DivergedError(RuntimeError):
    """A loss or gradient was not finite."""


class DesynchronizedError(RuntimeError):
    """Replicas that should be equal are not. All ranks raise this in the same step."""

    outcome = "and all other ranks stopped, in"
    """The words that the first line of the failure report has between the host and the phase of the
    rank.
    """


@dataclass(slots=True)
class Evaluation:
    """Mean loss and accuracy over `count` samples; the loss is None before the first evaluation."""

    loss: float | None = None
    top1: float = 0.0
    count: int = 0


class MetricSums:
    """Sums of losses and correct predictions, kept on the device, so that a step need not wait for
    the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.vector = torch.zeros(3, dtype=torch.float64, device=device)
        """float64 [3]: sum of losses, number of correct predictions, number of samples."""

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch. loss_sum: [], logits: [B, C], labels: [B], negative for no label; or [B, C],
        0 for no label.
        """
        # mixed images: the class with the largest share counts as the correct one
        if labels.ndim == 2:
            shares, classes = labels.max(1)
            labels = torch.where(shares > 0, classes, -1)
        self.vector[0] += loss_sum
        self.vector[1] += (logits.argmax(1) == labels).sum()
        self.vector[2] += (labels >= 0).sum()


class SampleDigest:
    """A digest of the samples that each step of an epoch used. It is a sum of hashes: digests of
    ranks can be added.

    Two epochs with equal digests used the same samples in the same global batches, whatever the
    world size.
    """

    def __init__(self, device: torch.device) -> None:
        self.vector = torch.zeros(2, dtype=torch.int64, device=device)
        """int64 [2]: sum of the hashes (wrapping around), number of samples."""

    def add(self, ids: Tensor, *, step: int) -> None:
        """Add the samples of step `step` of the epoch to the digest. ids: int64 [B], positions in
        the data set.
        """
        mixed = (ids + step * 0x1000003) * -0x61C8864680B583EB  # the golden ratio's odd multiplier
        mixed = (
            mixed ^ (mixed >> 29)
        ) * -0x40A7B892E31B1A47  # as in splitmix64, with arithmetic shifts
        self.vector[0] += (mixed ^ (mixed >> 32)).sum()
        self.vector[1] += len(ids)

    @staticmethod
    def text(total: int) -> str:
        """Return the sum of hashes `total`, an int64, as 16 hexadecimal digits."""
        return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


class Progress:
    """The progress of a run: last evaluation, best accuracy, digest of this epoch's sample ids,
    seconds spent.
    """

    def __init__(self, world: World, sums: MetricSums) -> None:
        self.world = world
        self.sums = sums
        self.best_top1 = 0.0
        self.evaluation = Evaluation()
        self.digest = SampleDigest(world.device)
        self.earlier_seconds = 0.0
        self.began = time.perf_counter()

    def seconds(self) -> float:
        """Return the wall-clock seconds spent on this run, over all launches."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        """Return tensors (sums over ranks) and builtins for a checkpoint. Collective: every rank
        must call this.
        """
        return {
            "digest": self.world.all_reduce(self.digest.vector.clone()),
            "window": self.world.all_reduce(self.sums.vector.clone()),
            "seconds": self.seconds(),
            "evaluation": list(astuple(self.evaluation)),
        }

    def load_state_dict(self, state: dict[str, Any], *, best_top1: float) -> None:
        """Restore a result of `state_dict`, and the best accuracy, 0 to 1. Only rank 0 restores the
        sums over ranks.
        """
        self.best_top1 = best_top1
        if self.world.is_main:
            self.digest.vector += state["digest"].to(self.world.device)
            self.sums.vector += state["window"].to(self.world.device)
        self.earlier_seconds = state["seconds"]
        self.evaluation = Evaluation(*state["evaluation"])


class NonFinite:
    """Records the first step whose loss or gradient is not finite, without waiting for the
    device.
    """

    NEVER = 2**62

    def __init__(self, device: torch.device) -> None:
        self.first = torch.full((), self.NEVER, dtype=torch.int64, device=device)
        """int64 []: the first step with a value that is not finite, or NEVER."""

    def check(self, values: Tensor, *, step: int) -> None:
        """Record optimizer step `step` if any of `values` is not finite and no earlier step is
        recorded.
        """
        self.first = torch.where(
            torch.isfinite(values.sum()), self.first, self.first.clamp(max=step)
        )

    @property
    def flag(self) -> Tensor:
        """float64 [1]: 1 if any step so far had a value that is not finite, else 0."""
        return (self.first < self.NEVER).double()[None]

    def fail(self, world: World, *, lr: float) -> NoReturn:
        """Raise `DivergedError`, which names `lr` and the first step with values not finite on a
        rank. Collective.
        """
        step = min(world.all_gather_object(int(self.first)))
        raise DivergedError(
            f"the loss or gradient of step {step} is not finite (lr {lr:g}): lower optimizer.lr, "
            "set max_grad_norm, or set on_nonfinite=skip to leave such updates out"
        )


def check_replicas(model: nn.Module, world: World, *, step: int) -> None:
    """Check that parameters and integer buffers are bitwise equal on all ranks. Collective: every
    rank must call this.

    Raises DesynchronizedError on all ranks if they are not.
    """
    integers = (buffer for buffer in model.buffers() if not buffer.is_floating_point())
    # any single bit of a value changes it
    own = torch.zeros(1, dtype=torch.int64, device=world.device)
    for number, tensor in enumerate([*model.parameters(), *integers]):
        bits = tensor.detach().contiguous().view(-1)
        bits = bits.view(torch.int32).long() if bits.is_floating_point() else bits
        odd = torch.arange(bits.numel(), device=bits.device) * 2 + (2 * number + 1)
        own += (bits * odd).sum() * (2 * number + 1)
    prints = [int(other) for other in world.all_gather(own)]
    if differing := [rank for rank, value in enumerate(prints) if value != prints[0]]:
        odd = rank_outside_majority(prints)
        who = f"rank {differing[0]} holds other parameters than rank 0"
        raise DesynchronizedError(
            f"{who if odd is None else f'rank {odd} holds other parameters than the rest'} after"
            f" step {step}: no checkpoint was saved; the cause is faulty memory, or code that"
            " treats ranks differently"
        )


def rank_outside_majority(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value is not that of more than half of the ranks; None if there
    is no such half.
    """
    usual, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != usual]
    return odd[0] if odd and 2 * count > len(values) else None
