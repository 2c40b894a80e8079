"""The weights of a model as tensors by name."""

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor, nn


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
