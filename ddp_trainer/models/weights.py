"""The weights of a model: as tensors by name, and their moving average."""

import copy
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the parameters and buffers of `model`; RuntimeError if they do not match.

    torch keeps the versions of modules in the attribute ``_metadata`` of a state dict; files lack
    it. Some modules reject a state dict without it (MNASNet of torchvision), so it is copied from
    `model`.
    """
    state = OrderedDict(tensors)
    state._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    model.load_state_dict(state)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `model` by name: the parameters themselves, and copies of buffers."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {
        name: value.clone() if name in buffers else value
        for name, value in model.state_dict().items()
    }


class AveragedWeights:
    """A copy of a model whose parameters and BatchNorm statistics are averages over the steps.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992;
    torch's `AveragedModel` is not used, because it reads a counter from the device in each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """decay: the share of the old average in the new one, in (0, 1)."""
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.average = get_ema_multi_avg_fn(decay)
        pairs = list(
            zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        )
        self.pairs = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the weights of the model; to be called after each step."""
        averages, values = zip(*self.pairs, strict=True)
        self.average(averages, values, 0)
        for counter, value in self.counters:
            counter.copy_(value)
