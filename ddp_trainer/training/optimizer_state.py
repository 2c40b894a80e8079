"""The state of an optimizer that was read from a checkpoint."""

from typing import Any

import torch
from torch.optim import Optimizer

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


def check_keys(optimizer: Optimizer, saved: dict[int, Any]) -> None:
    """Check that a saved state has what `optimizer` has now, before the first step.

    Raises:
        ValueError: something is missing, such as the momentum of a parameter.
    """
    for index, state in optimizer.state_dict()["state"].items():
        if not state.keys() <= saved.get(index, {}).keys():
            raise ValueError(f"the optimizer's {', '.join(state)} of parameter {index} is missing")


def match_layout(optimizer: Optimizer) -> None:
    """Convert the optimizer's state to the strides of the parameters; a checkpoint may have others.

    Fused kernels need equal strides, because they ignore strides: they process a parameter and its
    state in the order of memory.

    Raises:
        ValueError: a moment of torch's optimizers is no tensor of the shape of its parameter.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            has_shape = torch.is_tensor(value) and value.shape == parameter.shape
            if key in MOMENTS and not has_shape:
                raise ValueError(f"the optimizer's {key} has not the shape of its parameter")
            if has_shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
