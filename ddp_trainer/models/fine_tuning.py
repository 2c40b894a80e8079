"""Fine-tuning: weights from a file, a new last layer, and parameters that are not trained."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.models.state import load_state

logger = logging.getLogger(__name__)

BACKBONE = "backbone"
SECTIONS = ("ema", "model", "state_dict", "model_state_dict")
"""Keys under which files have their weights: of this project and torchvision, of timm and
Lightning, and others.
"""
PREFIXES = ("module.", "model.", "_orig_mod.")
"""Prefixes that DDP, Lightning and torch.compile add to the names of tensors."""
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Prefixes of the tensors of auxiliary classifiers (inception_v3, googlenet), which the models here
do not have.
"""


def load_weights(model: nn.Module, file: str, *, num_classes: int) -> None:
    """Load the weights in `file` into `model`, without those of auxiliary classifiers that the
    model does not have.

    The last layer of `model` stays as it is if its shape in the file differs or the file lacks it.

    Raises:
        ConfigError: the file cannot be read, or other names or shapes of its tensors differ from
        those of the model.
    """
    own = model.state_dict()
    head = head_names(model, num_classes)
    state = without_prefixes(read_weights(Path(file).expanduser()), own)
    state = {
        name: tensor
        for name, tensor in state.items()
        if name in own or not name.startswith(AUXILIARY)
    }
    wrong = [name for name in own if name in state and state[name].shape != own[name].shape]
    if set(wrong) & head:
        state = {name: tensor for name, tensor in state.items() if name not in head}
    missing = [
        name
        for name in own
        if name not in state and name not in head and own[name].is_floating_point()
    ]
    problems = [
        f"{name} is {list(state[name].shape)} in the file and {list(own[name].shape)} in the model"
        for name in wrong
        if name not in head
    ]
    problems += [f"{name} is not in the file" for name in missing]
    problems += [f"{name} is not in the model" for name in state if name not in own]
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    require(
        not problems,
        f"model.weights={file} does not match the model: {'; '.join(problems[:3])}{more}; choose"
        " the model and the options with which the file was saved",
    )
    load_state(model, state, strict=False)
    new = ", ".join(name for name in own if name in head and name not in state) or "none"
    logger.info("loaded %d tensors from %s; randomly initialized: %s", len(state), file, new)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file by name; ConfigError if the file cannot be read or has no
    tensors.
    """
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
    is_state = (
        isinstance(state, dict)
        and bool(state)
        and all(torch.is_tensor(value) for value in state.values())
    )
    require(
        is_state,
        f"model.weights={path} has no weights: it must be a dict of tensors by name, like a"
        " state_dict",
    )
    return state


def without_prefixes(state: dict[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """Return `state` without prefixes that a wrapper added to all names. own: the names without a
    wrapper.
    """
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
    """Exclude the parameters that `prefixes` select from training; ConfigError if a prefix matches
    no parameter.

    A prefix is the name of a module or parameter, or "backbone": all parameters except those of the
    last layer, which is the last one with `num_classes` outputs.
    """
    head = head_names(model, num_classes)
    for prefix in prefixes:
        names = [
            name
            for name, _ in model.named_parameters()
            if (
                name not in head
                if prefix == BACKBONE
                else f"{name}.".startswith(f"{prefix.rstrip('.')}.")
            )
        ]
        children = ", ".join(name for name, _ in model.named_children())
        require(
            bool(names),
            f"model.freeze={prefix} matches no parameter; choose from {BACKBONE}, {children}",
        )
        for name in names:
            model.get_parameter(name).requires_grad_(False)


def head_names(model: nn.Module, num_classes: int) -> set[str]:
    """Return the parameter names of the last layer with `num_classes` outputs; empty if there is no
    such layer.
    """
    for name, module in reversed(list(model.named_modules())):
        own = dict(module.named_parameters(recurse=False))
        if own and all(parameter.shape[:1] == (num_classes,) for parameter in own.values()):
            return {f"{name}.{key}" if name else key for key in own}
    return set()
