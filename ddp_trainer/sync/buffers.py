"""BatchNorm statistics: local while training, averaged over ranks where a model is evaluated or saved."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.process_group import World
from ddp_trainer.sync.base import flatten, unflatten


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that differ from rank to rank: running means and variances."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def flatten_buffers(model: nn.Module) -> Tensor:
    """Return a copy of all floating buffers as one float32 vector [n]; n is 0 for a model without any."""
    none = torch.zeros(0, device=next(model.parameters()).device)
    return flatten([none, *(buffer.float() for buffer in floating_buffers(model))])


def restore_buffers(model: nn.Module, vector: Tensor) -> None:
    """Write a vector made by `flatten_buffers` back into the model."""
    unflatten(vector, floating_buffers(model))


@contextmanager
def averaged_statistics(model: nn.Module, world: World) -> Iterator[Tensor]:
    """Within the context the model's statistics are the mean over ranks; after it, this rank's own again.

    Yields this rank's own as a vector. Restoring them keeps training a function of its steps alone: an extra
    evaluation or save changes nothing, not even a rounding. Collective: every rank must call this.
    """
    own = flatten_buffers(model)
    if own.numel() and world.world_size > 1:
        restore_buffers(model, world.all_reduce(own.clone()) / world.world_size)
    try:
        yield own
    finally:
        restore_buffers(model, own)
