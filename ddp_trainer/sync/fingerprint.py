"""A hash of the bits of tensors, and the check that all replicas of a model are equal."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.world import World

WORDS = {1: torch.uint8, 2: torch.int16}
"""The type as which elements are read, by their size in bytes; larger elements are int32 words."""
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd, with bits like random ones: 2^64 / golden ratio


def bit_sum(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum modulo 2^64 of the words of `tensors`, each times its weight, as int64 [].

    Weights are odd, so that a change of any single bit changes the sum. A weight is a pseudo-random
    function of the word's position in all `tensors`, so that a swap of values or of tensors changes
    the sum too, except with a probability of about 2^-32.

    There must be at least one tensor. The host does not wait for the device.
    """
    sums = []
    position = 0
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(WORDS.get(tensor.element_size(), torch.int32))
        weights = torch.arange(position, position + words.numel(), device=tensor.device)
        for _ in range(2):  # after one round, weights are still nearly linear in the position
            weights *= MULTIPLIER
            weights ^= weights >> 32
        sums.append((weights.bitwise_or_(1) * words).sum())
        position += words.numel()
    return torch.stack(sums).sum()


class DesynchronizedError(RuntimeError):
    """Replicas that should be equal are not. All ranks raise this in the same step."""

    outcome = "and all other ranks stopped, in"
    """The words between the host and the phase of this rank in a report (see `RankStatus.line`)."""


def check_replicas(model: nn.Module, world: World, *, step: int) -> None:
    """Check that parameters and integer buffers are bitwise equal on all ranks. Collective.

    Raises:
        DesynchronizedError: on all ranks, if they are not.
    """
    own_statistics = {name for name, value in model.named_buffers() if value.is_floating_point()}
    state = model.state_dict()
    shared = [value for name, value in state.items() if name not in own_statistics]
    own = bit_sum(value for value in shared if torch.is_tensor(value))[None]
    sums = [int(other) for other in world.all_gather(own)]
    if len(set(sums)) == 1:
        return

    odd = rank_outside_majority(sums)
    who = "the parameters differ between ranks"
    if odd is not None:
        who = f"the parameters of rank {odd} differ from those of the other ranks"
    raise DesynchronizedError(
        f"{who} after step {step}, and are not saved: the memory or processor of a node is faulty,"
        " or code treats ranks differently: resume on other nodes, or mend that code"
    )


def rank_outside_majority(values: Sequence[Any]) -> int | None:
    """Return the first rank whose value differs from the value of more than half of the ranks.

    None if no value has such a majority, or if all values are equal.
    """
    usual, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return None
    return next((rank for rank, value in enumerate(values) if value != usual), None)
