"""Loads and lists the weights of a model, and averages them over the steps."""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the parameters and buffers of `model`; RuntimeError if they do not match.

    Tensors of another type do not match, because converted ones may be infinite. ``_metadata``,
    which files lack, is that of `model`, because torchvision's MNASNet needs this attribute.
    """
    own = model.state_dict()
    for name, value in tensors.items():
        if name in own and value.dtype != own[name].dtype:
            raise RuntimeError(f"{name} is {value.dtype}, and must be {own[name].dtype}")
    state = OrderedDict(tensors)
    state._metadata = own._metadata  # type: ignore[attr-defined]
    model.load_state_dict(state)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `model` by name: the parameters themselves, and copies of buffers.

    Buffers are copied, because `RunState` calls this function while they have their mean over
    ranks, and gives them this rank's own values again before the tensors are saved.
    """
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {
        name: value.clone() if name in buffers else value
        for name, value in model.state_dict().items()
    }


class AveragedWeights:
    """A copy of a model with moving averages of the parameters and BatchNorm statistics.

    The averages are exponential. torch's `AveragedModel` is not used, because it waits for the
    device in each step to read a counter.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """decay: the share of the old average in the new one, in (0, 1)."""
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.average = get_ema_multi_avg_fn(decay)

    def connect(self, averages: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Set the tensors of both models that `update` uses, in the same order."""
        pairs = list(zip(averages, values, strict=True))
        self.pairs = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights of the model. Called after each step."""
        averages, values = zip(*self.pairs, strict=True)
        self.average(averages, values, 0)
        for counter, value in self.counters:
            counter.copy_(value)
