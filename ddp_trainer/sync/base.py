"""The extension point: what a strategy is asked to do in a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class GradientSync:
    """How replicas agree. The base is the one-process case: nothing to do."""

    @property
    def is_settled(self) -> bool:
        """Say whether parameters are equal on every rank now; a run is saved and stopped only then."""
        return True

    @property
    def num_devices(self) -> int:
        """The devices that this rank trains on; a CPU is one, however many replicas share it."""
        return 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return what training calls in place of `model`; called once, before the optimizer is built."""
        return model

    def begin(self) -> None:
        """Take note that the model is now what this launch begins with, new or restored."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients local: all microbatches but the last."""
        return nullcontext()

    def before_step(self) -> None:
        """Leave in every ``.grad`` the mean over ranks."""

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the 2-norm [] of all gradients of `model`, the same on every rank that is to clip or skip alike."""
        return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    def after_step(self, optimizer: Optimizer) -> None:
        """Leave the same parameters on every rank, or `is_settled` false."""

    def settle(self, optimizer: Optimizer) -> None:
        """Leave the same parameters on every rank now. Collective: every rank must call this."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer's ``state_dict()``. Collective: every rank must call this."""
        return optimizer.state_dict()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements of `tensors`, one after another: [n]."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write a vector made by `flatten` back into `tensors`."""
    with torch.no_grad():
        for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
