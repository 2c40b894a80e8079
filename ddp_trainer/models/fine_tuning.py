"""Fine-tuning: weights from a file, a new last layer, and parameters that are not trained."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.models.weights import load_state

logger = logging.getLogger(__name__)

State = dict[str, Tensor]

BACKBONE = "backbone"
SECTIONS = ("ema", "model", "state_dict", "model_state_dict")
"""Keys of the weights in files of this project, torchvision, timm, Lightning and others."""
PREFIXES = ("module.", "model.", "_orig_mod.")
"""Prefixes that DDP, Lightning and torch.compile add to the names of tensors."""
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Prefixes of auxiliary classifiers (inception_v3, googlenet), which the models here lack."""


def load_weights(model: nn.Module, file: str, *, num_classes: int) -> None:
    """Load the weights in `file` into `model`, except those of auxiliary classifiers.

    The last layer of `model` stays as it is if its shape in the file differs or the file lacks it.

    Raises:
        ConfigError: the file cannot be read, or other names or shapes of its tensors differ from
        those of the model.
    """
    own = model.state_dict()
    head = head_names(model, num_classes)
    state = select(without_prefixes(read_weights(Path(os.path.expanduser(file))), own), own, head)
    optional = {key: own[key] for key in own if key in head or not own[key].is_floating_point()}
    try:
        load_state(model, optional | state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.weights={file} does not match the model: {reason}; choose the model and the"
            " options with which the file was saved"
        ) from error
    new = ", ".join(key for key in own if key in head and key not in state) or "none"
    logger.info("loaded %d tensors from %s; randomly initialized: %s", len(state), file, new)


def select(state: State, own: State, head: set[str]) -> State:
    """Return `state` without auxiliary classifiers, and without `head` if its shapes are not `own`.

    head: the names of the parameters of the last layer. own: the tensors of the model.
    """
    is_other_head = any(key in state and state[key].shape != own[key].shape for key in head)
    return {
        key: value
        for key, value in state.items()
        if not (is_other_head and key in head) and (key in own or not key.startswith(AUXILIARY))
    }


def read_weights(path: Path) -> State:
    """Return the tensors in a file by name; ConfigError if it cannot be read or has none."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file  # an extra

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.weights={path} needs safetensors: pip install 'ddp_trainer[timm]'"
        ) from error
    except Exception as error:  # a file that is not a checkpoint may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.weights={path} cannot be read ({reason}): give a file saved by torch.save or a"
            " .safetensors file"
        ) from error
    for section in SECTIONS:
        if isinstance(state, dict) and isinstance(state.get(section), dict):
            state = state[section]
    require(
        isinstance(state, dict) and bool(state) and all(map(torch.is_tensor, state.values())),
        f"model.weights={path} has no weights: it must be a dict of tensors by name, like a"
        " state_dict",
    )
    return state


def without_prefixes(state: State, own: Iterable[str]) -> State:
    """Return `state` without prefixes that wrappers added to all names; `own` has none."""
    state = dict(state)
    while not state.keys() & set(own):
        prefix = next(
            (prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in state)), None
        )
        if prefix is None:
            break
        consume_prefix_in_state_dict_if_present(state, prefix)
    return state


def freeze(model: nn.Module, prefixes: list[str], *, num_classes: int) -> None:
    """Exclude the parameters that `prefixes` select from training.

    A prefix is the name of a module or parameter, or "backbone": all parameters except those of the
    last layer with `num_classes` outputs. ConfigError if a prefix matches no parameter.
    """
    head = head_names(model, num_classes)
    for prefix in prefixes:
        start = f"{prefix.rstrip('.')}."
        selected = [
            parameter
            for name, parameter in model.named_parameters()
            if (name not in head if prefix == BACKBONE else f"{name}.".startswith(start))
        ]
        children = ", ".join(name for name, _ in model.named_children())
        require(
            bool(selected),
            f"model.freeze={prefix} matches no parameter; choose from {BACKBONE}, {children}",
        )
        for parameter in selected:
            parameter.requires_grad_(False)


def head_names(model: nn.Module, num_classes: int) -> set[str]:
    """Return the names of the parameters of the last layer with `num_classes` outputs, if any."""
    for name, module in reversed(list(model.named_modules())):
        own = dict(module.named_parameters(recurse=False))
        if own and all(parameter.shape[:1] == (num_classes,) for parameter in own.values()):
            return {f"{name}.{key}" if name else key for key in own}
    return set()
