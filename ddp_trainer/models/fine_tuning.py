"""Fine-tuning: weights from a file, a new last layer, and parameters that are not trained."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ddp_trainer.config.errors import ConfigError, one_line, printable, require
from ddp_trainer.models.weight_files import find_weights
from ddp_trainer.models.weights import load_state

logger = logging.getLogger(__name__)

BACKBONE = "backbone"
"""The value in model.freeze that stands for all parameters except those of the last layer."""
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Prefixes of the auxiliary classifiers that inception_v3 and googlenet do not have here."""
MAX_NAMES = 5
"""The largest number of unused tensors that the log names."""


def load_weights(model: nn.Module, file: str, *, num_classes: int) -> None:
    """Load the weights in `file` into `model`, except those of auxiliary classifiers.

    Tensors beside the weights, for example those of a loss, are left out; the log names them. A
    tensor of the last layer stays as it is if the file lacks it or has another shape for it.

    Raises:
        ConfigError: the file cannot be read, its other tensors differ from those of `model` in
            name or shape, or it has weights that are not floating-point numbers, or not finite.
    """
    own = model.state_dict()
    head = head_names(model, num_classes)

    def is_used(name: str, value: Tensor) -> bool:
        if name in head:
            return value.shape == own[name].shape
        return name in own or not name.startswith(AUXILIARY)

    shapes = {name: value.shape for name, value in own.items()}
    weights = find_weights(Path(os.path.expanduser(file)), shapes)
    state = {name: value for name, value in weights.state.items() if is_used(name, value)}
    check_types(file, state, own)
    state = {name: value.to(own.get(name, value).dtype) for name, value in state.items()}
    optional = {key: own[key] for key in own if key in head or not own[key].is_floating_point()}
    try:
        load_state(model, optional | state)
    except RuntimeError as error:
        raise ConfigError(
            f"model.weights={file} does not match the model: {one_line(error).rstrip('.')}; choose"
            " the model and the options with which the file was saved, and a data set whose images"
            " have as many channels"
        ) from error
    check_finite(file, {name: own[name] for name in state})
    new = ", ".join(key for key in own if key in head and key not in state) or "none"
    left = [*weights.unused, *(name for name in weights.state if name not in state)]
    unused = ", ".join(left[:MAX_NAMES]) + " …" * (len(left) > MAX_NAMES)
    logger.info(
        "loaded %d tensors from %s%s; randomly initialized: %s; not used: %s",
        len(state),
        file,
        printable(weights.source),
        new,
        printable(unused) or "none",
    )


def check_types(file: str, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a weight in `file` is no floating-point number, but is one in the model.

    The elements of a quantized tensor would be taken for weights.
    """
    for name, value in state.items():
        expects_float = name in own and own[name].is_floating_point()
        require(
            value.is_floating_point() or not expects_float,
            f"model.weights={file} does not match the model: {name} is {value.dtype}, and must be"
            " floating-point numbers: give the weights before they were quantized or converted",
        )


def check_finite(file: str, weights: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if one of `weights`, which were loaded from `file`, is infinite or NaN."""
    for name, value in weights.items():
        require(
            bool(value.isfinite().all()),
            f"model.weights={file} cannot be used: {name} has infinite values or NaN (as"
            f" {value.dtype}): give an earlier or undamaged file",
        )


def freeze(model: nn.Module, prefixes: list[str], *, num_classes: int) -> None:
    """Exclude parameters of `model` from training.

    Each of `prefixes` is the name of a module or parameter, or "backbone", which stands for all
    parameters except those of the last layer with `num_classes` outputs. Raises ConfigError if a
    prefix matches no parameter.
    """
    head = head_names(model, num_classes)
    for prefix in prefixes:
        start = f"{prefix.rstrip('.')}."
        selected = [
            parameter
            for name, parameter in model.named_parameters()
            if (name not in head if prefix == BACKBONE else f"{name}.".startswith(start))
        ]
        children = ", ".join(
            name for name, child in model.named_children() if [*child.parameters()]
        )
        require(
            bool(selected),
            f"model.freeze={prefix} matches no parameter; choose from {BACKBONE}, {children}",
        )
        for parameter in selected:
            parameter.requires_grad_(False)


def head_names(model: nn.Module, num_classes: int) -> set[str]:
    """Return the parameter names of the last layer with `num_classes` outputs; empty if none."""
    for name, module in reversed(list(model.named_modules())):
        own = dict(module.named_parameters(recurse=False))
        if own and all(parameter.shape[:1] == (num_classes,) for parameter in own.values()):
            return {f"{name}.{key}" if name else key for key in own}
    return set()
