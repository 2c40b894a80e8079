"""A hash of tensors, by which ranks compare parameters and gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16}
"""The integers as which elements are read, by their size in bytes; larger ones are int32 words."""
MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # odd, with bits like random ones: 2^64 / golden ratio


def bit_sum(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum modulo 2^64 of the words of `tensors`, each times its weight, as int64 [].

    A weight is odd, so that a change of any single bit changes the sum. It is a pseudo-random
    function of the word's position in all `tensors`, so that a swap of values or of tensors changes
    the sum too, except with a probability of about 2^-32.

    There must be at least one tensor. The host does not wait for the device.
    """
    sums = []
    position = 0
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(WORDS.get(tensor.element_size(), torch.int32))
        weights = torch.arange(position, position + words.numel(), device=tensor.device)
        for _ in range(2):  # after one round, weights at equal distances differ by nearly the same
            weights *= MULTIPLIER
            weights ^= weights >> 32
        sums.append((weights.bitwise_or_(1) * words).sum())
        position += words.numel()
    return torch.stack(sums).sum()
