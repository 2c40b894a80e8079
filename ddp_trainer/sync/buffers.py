"""Buffers, such as BatchNorm statistics: a rank trains with its own ones; their mean is saved."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import flatten, unflatten


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers, such as BatchNorm statistics, which may differ by rank."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flatten_buffers(model: nn.Module) -> Tensor:
    """Return a copy of all floating buffers as one vector, float32 [n]; n may be 0."""
    none = torch.zeros(0, device=next(model.parameters()).device)
    return flatten([none, *(buffer.float() for buffer in floating_buffers(model))])


def restore_buffers(model: nn.Module, vector: Tensor) -> None:
    """Write `vector`, a result of `flatten_buffers`, into the floating-point buffers of `model`."""
    unflatten(vector, floating_buffers(model))


@contextmanager
def averaged_statistics(model: nn.Module, world: World) -> Iterator[Tensor]:
    """Set all floating buffers to their mean over ranks inside the context. Collective.

    Yields this rank's own buffers as the vector of `flatten_buffers`, and restores them at the end
    of the context. So an extra evaluation or save does not change the training, not even by a
    rounding error (except that float64 buffers are rounded to float32).
    """
    own = flatten_buffers(model)
    if own.numel():
        restore_buffers(model, world.all_reduce(own.clone()) / world.world_size)
    try:
        yield own
    finally:
        restore_buffers(model, own)


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers, integer buffers too, to their exact values when the context ends."""
    kept = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), kept, strict=True):
                buffer.copy_(value)
