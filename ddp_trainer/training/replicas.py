"""The check that all replicas of a model are equal, bit by bit."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from ddp_trainer.distributed.world import World
from ddp_trainer.sync.fingerprint import bit_sum


class DesynchronizedError(RuntimeError):
    """Replicas that should be equal are not. All ranks raise this in the same step."""

    outcome = "and all other ranks stopped, in"
    """The words between the host and the phase of the rank in the report of the failure."""


def check_replicas(model: nn.Module, world: World, *, step: int) -> None:
    """Check that parameters and integer buffers are bitwise equal on all ranks. Collective.

    Raises:
        DesynchronizedError: on all ranks, if they are not.
    """
    integers = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]
    own = bit_sum([*model.parameters(), *integers])[None]
    sums = [int(other) for other in world.all_gather(own)]
    differing = [rank for rank, value in enumerate(sums) if value != sums[0]]
    if not differing:
        return

    odd = rank_outside_majority(sums)
    who = f"rank {differing[0]} holds other parameters than rank 0"
    if odd is not None:
        who = f"rank {odd} holds other parameters than the rest"
    raise DesynchronizedError(
        f"{who} after step {step}: no checkpoint was saved; the cause is faulty memory, or code "
        "that treats ranks differently"
    )


def rank_outside_majority(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value is not that of more than half of the ranks, or None."""
    usual, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != usual]
    return odd[0] if odd and 2 * count > len(values) else None
