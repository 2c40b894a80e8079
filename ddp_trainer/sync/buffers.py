"""Buffers, such as BatchNorm's statistics: a rank trains with its own, and the mean is saved."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import flatten, unflatten


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers, which may differ from rank to rank, such as BatchNorm's
    statistics.
    """
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flatten_buffers(model: nn.Module) -> Tensor:
    """Return a copy of all floating buffers as one float32 vector [n]; n is 0 for a model without
    any.
    """
    none = torch.zeros(0, device=next(model.parameters()).device)
    return flatten([none, *(buffer.float() for buffer in floating_buffers(model))])


def restore_buffers(model: nn.Module, vector: Tensor) -> None:
    """Write a vector made by `flatten_buffers` back into the model."""
    unflatten(vector, floating_buffers(model))


@contextmanager
def averaged_statistics(model: nn.Module, world: World) -> Iterator[Tensor]:
    """Set all floating buffers to their mean over ranks inside the context, and restore them after
    it.

    Yields this rank's own buffers as the vector of `flatten_buffers`. They are restored so that an
    extra evaluation or save does not change the training, not even by a rounding error. Collective:
    every rank must call this.
    """
    own = flatten_buffers(model)
    if own.numel() and world.world_size > 1:
        restore_buffers(model, world.all_reduce(own.clone()) / world.world_size)
    try:
        yield own
    finally:
        restore_buffers(model, own)


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, integers too, bit by bit after the context."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)
