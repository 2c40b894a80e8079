"""Sums and counts, the ledger of samples, what must not differ between ranks, and where a run stands."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ddp_trainer.distributed import World


class DivergedError(RuntimeError):
    """A loss or gradient was not finite."""


class DesynchronisedError(RuntimeError):
    """Replicas that should be equal are not."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """Mean loss and accuracy over `count` samples."""

    loss: float = float("nan")
    top1: float = 0.0
    count: int = 0


class Sums:
    """Loss and correct answers, added up on the device; read only where ranks meet."""

    def __init__(self, device: torch.device) -> None:
        self.vector = torch.zeros(3, dtype=torch.float64, device=device)
        """float64 [3]: sum of losses, number correct, number of samples."""

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch. loss_sum: [], logits: [B, C], labels: [B]."""
        self.vector[0] += loss_sum
        self.vector[1] += (logits.argmax(1) == labels).sum()
        self.vector[2] += len(labels)

    def reset(self) -> None:
        """Start from zero."""
        self.vector.zero_()


class Ledger:
    """A digest of which sample was used at which position, summed so that ranks can add theirs up.

    Two epochs with equal digests used the same samples in the same global batches, however many ranks there were.
    """

    def __init__(self, device: torch.device) -> None:
        self.vector = torch.zeros(2, dtype=torch.int64, device=device)
        """int64 [2]: sum of the hashes (wrapping around), number of samples."""

    def add(self, ids: Tensor, *, step: int) -> None:
        """Add the samples `ids`, int64 [B], used at step `step` of the epoch."""
        mixed = (ids + step * 0x1000003) * -0x61C8864680B583EB  # the golden ratio's odd multiplier
        mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47  # as in splitmix64; shifts keep the sign, no matter
        self.vector[0] += (mixed ^ (mixed >> 32)).sum()
        self.vector[1] += len(ids)

    @staticmethod
    def text(total: int) -> str:
        """Return a digest as 16 hexadecimal digits."""
        return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


class NonFinite:
    """Finds the first step whose loss or gradient is infinite or no number, without waiting for the device."""

    NEVER = 2**62

    def __init__(self, device: torch.device) -> None:
        self.first = torch.full((), self.NEVER, dtype=torch.int64, device=device)
        """int64 []: the first such step, or NEVER."""

    def check(self, values: Tensor, *, step: int) -> None:
        """Note optimizer step `step` if any of `values` is not finite."""
        self.first = torch.where(torch.isfinite(values.sum()), self.first, self.first.clamp(max=step))

    @property
    def found(self) -> Tensor:
        """float64 [1]: 1 after such a step, else 0."""
        return (self.first < self.NEVER).double()[None]

    def tell(self, world: World, *, lr: float) -> NoReturn:
        """Raise `DivergedError`, naming the first such step on any rank. Collective: every rank must call this."""
        step = min(world.gather(int(self.first)))
        raise DivergedError(
            f"the loss or gradient of step {step} is not finite (lr {lr:g}): lower optimizer.lr, "
            "set max_grad_norm, or set on_nonfinite=skip to leave such updates out"
        )


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Return an int64 [] that changes with any single bit of the (float32 or int64) `tensors`."""
    total = torch.zeros((), dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(-1)
        bits = bits.view(torch.int32).long() if bits.is_floating_point() else bits
        odd = torch.arange(bits.numel(), device=bits.device) * 2 + (2 * number + 1)
        total = total.to(bits.device) + (bits * odd).sum() * (2 * number + 1)
    return total


def check_replicas(model: nn.Module, world: World, *, step: int) -> None:
    """See that the parameters of `model` are bitwise equal on all ranks. Collective: every rank must call this.

    Raises:
        DesynchronisedError: on all ranks, when one holds others than the rest.
    """
    integers = (buffer for buffer in model.buffers() if not buffer.is_floating_point())
    mine = fingerprint([*model.parameters(), *integers])[None]
    prints = [int(other) for other in world.gather_tensor(mine)]
    usual = max(prints, key=prints.count)
    if odd := [rank for rank, value in enumerate(prints) if value != usual]:
        raise DesynchronisedError(
            f"rank {odd[0]} holds other parameters than {'the rest' if len(prints) > 2 else 'rank 0'} after "
            f"step {step}: nothing was saved; bad memory, or code that treats ranks differently"
        )


class Progress:
    """Where a run stands: all that a checkpoint holds besides the model and its optimizer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.step, self.best_top1 = 0, 0.0
        self.evaluation = Evaluation()
        self.sums, self.ledger = Sums(world.device), Ledger(world.device)
        self.nonfinite = NonFinite(world.device)
        self.earlier_seconds, self.began = 0.0, time.perf_counter()

    def seconds(self) -> float:
        """Return the wall-clock seconds spent on this run, over all launches."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        """Return sums over ranks and the rest as builtins. Collective: every rank must call this."""
        last = self.evaluation
        return {
            "ledger": self.world.sum(self.ledger.vector.clone()),
            "window": self.world.sum(self.sums.vector.clone()),
            "seconds": self.seconds(),
            "evaluation": [last.loss, last.top1, last.count],
        }

    def load_state_dict(self, state: dict[str, Any], *, step: int, best_top1: float) -> None:
        """Take up what `state_dict` returned: one rank carries on the sums that all had."""
        self.step, self.best_top1 = step, best_top1
        if self.world.is_main:
            self.ledger.vector += state["ledger"].to(self.world.device)
            self.sums.vector += state["window"].to(self.world.device)
        self.earlier_seconds = state["seconds"]
        loss, top1, count = state["evaluation"]
        self.evaluation = Evaluation(loss=loss, top1=top1, count=count)


def reset_peak_memory(device: torch.device) -> None:
    """Have `peak_memory_mb` begin anew; resident memory's peak cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak of this rank's memory in MiB: on the GPU what torch allocated, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
