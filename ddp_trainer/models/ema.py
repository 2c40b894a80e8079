"""The exponential moving average of a model's weights, which is evaluated in their place."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


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
