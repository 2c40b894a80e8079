"""The extension point: what a strategy is asked to do in a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn


class GradientSync:
    """How replicas agree. The base is the one-process case: nothing to do."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return what training calls in place of `model`; called once, before the optimizer is built."""
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients local: all microbatches but the last."""
        return nullcontext()

    def before_step(self) -> None:
        """Leave in every ``.grad`` the mean over ranks."""

    def after_step(self) -> None:
        """Leave the same parameters on every rank."""
