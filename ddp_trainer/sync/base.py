"""`GradientSync`, the base class of all strategies: the methods that a training step calls."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.distributed.world import World


class GradientSync:
    """Keeps the replicas of a model equal. The base class is for one process, and sends nothing."""

    model: nn.Module

    def __init__(self, config: Any, world: World) -> None:
        self.config = config
        self.world = world

    @property
    def is_synchronized(self) -> bool:
        """Whether parameters are now equal on all ranks; checkpoints are saved only then."""
        return True

    @property
    def num_devices(self) -> int:
        """The number of devices of this rank; a CPU with several replicas counts as one device."""
        return 1

    @property
    def random_stream(self) -> int:
        """The number of this rank's random numbers, such as those of dropout."""
        return self.world.rank

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that training calls in place of `model`. Called once. Collective."""
        self.model = model
        return model

    def attach(self, optimizer: Optimizer, average: nn.Module | None) -> None:
        """Prepare the optimizer, and the module with averaged weights. Called once, after `wrap`.

        The base class does nothing.
        """

    def kept_tensors(self, model: nn.Module) -> list[Tensor]:
        """Return the parameters and buffers of `model`, or the parts that this rank keeps."""
        return [*model.parameters(), *model.buffers()]

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which each rank can call `model` on its own. Collective."""
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters of `model` that have a gradient."""
        return gradients_of(self.model)

    def begin(self) -> None:
        """Prepare for the first step of a launch. The base class does nothing.

        When this is called, the parameters are initialized, or restored from a checkpoint.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward sends no gradients.

        The training step uses this context for all microbatches of a step except the last.
        """
        return nullcontext()

    def before_step(self) -> None:
        """Set each ``.grad`` to its mean over ranks. Called after backward. Collective.

        The base class does nothing. DDP averages during backward and needs nothing here.
        """

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """Return the 2-norm of all gradients of `model`, []. Collective.

        The result is equal on all ranks, except with sync=local_sgd.
        """
        return nn.utils.get_total_norm(gradients_of(model))

    def after_step(self, optimizer: Optimizer) -> None:
        """Make parameters equal on all ranks. Called after the optimizer's step. Collective.

        If parameters still differ after this call, `is_synchronized` must be false.
        """

    def synchronize(self, optimizer: Optimizer) -> None:
        """Make parameters equal on all ranks now. Collective: every rank must call this."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's ``state_dict()`` with the state of all parameters. Collective."""
        return optimizer.state_dict()


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all parameters; frozen and unused parameters have none."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all elements of `tensors`, one after another: [n]."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def unflatten(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write `vector`, [n], which has the elements in the order of `flatten`, into `tensors`."""
    for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
