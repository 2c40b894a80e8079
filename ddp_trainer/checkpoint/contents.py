"""Checks what a checkpoint contains before anything uses it: its tensors, and the types in it."""

from types import NoneType
from typing import Any

from torch import Tensor, is_tensor, strided
from torch.utils._pytree import tree_leaves

Pattern = Any
"""A type, a tuple of patterns of which one must fit, or a pattern of the items of a container.

``[pattern]`` is a list of any length, and ``{str: pattern}`` is a dict with any keys. A longer list
has a pattern for each item, and any other dict has a pattern for each key. None stands for None,
and `Any` for any value.
"""
NUMBER = (int, float)
STATE: dict[str, Pattern] = {
    "model": {str: Tensor},
    "ema": ({str: Tensor}, None),
    "step": int,
    "epoch": int,
    "config": {str: Any},
    "best_top1": (*NUMBER, None),
    "best_value": (*NUMBER, None),
    "class_names": [str],
    "eval_split": str,
    "preprocessing": {
        "mean": [NUMBER],
        "std": [NUMBER],
        "image_shape": [int, int, int],
        "center_crop": (*NUMBER, str, None),
    },
    "data_fingerprint": str,
    "train_samples": int,
    "statistics_by_rank": [Tensor],
    "progress": {
        "digest": Tensor,
        "metric_sums": Tensor,
        "skipped_updates": NUMBER,
        "skipped_in_epoch": NUMBER,
        "seconds": NUMBER,
        "evaluation": [(*NUMBER, None), NUMBER, int],
        "stop_reason": (str, None),
    },
    "observers": {str: dict},
    "scaler": {str: Any},
    "weights_sha256": str,
}
"""The contents of a checkpoint, except the optimizer's state, which depends on the strategy."""


def check_tensors(state: dict[Any, Any]) -> None:
    """Check that each tensor has all of its elements in the file; ValueError if one has not.

    A tensor with strides of 0, for example, may have more elements than the memory can hold.
    """
    for tensor in filter(is_tensor, tree_leaves(state)):
        is_plain = tensor.layout is strided and tensor.device.type == "cpu"
        is_number = not tensor.is_quantized and tensor.itemsize * 8 in (8, 16, 32, 64, 128)
        if not (is_plain and is_number):
            raise ValueError("it has a tensor that is not a dense one on the CPU")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError("it has a tensor that is larger than its storage")


def check_types(state: dict[Any, Any]) -> None:
    """Check the types of the entries of a checkpoint that are there; ValueError names a wrong one.

    A missing entry is no error here: another version may have written the file.
    """
    if state.get("step", 0) < 0 or state.get("eval_split", "test") not in ("test", "validation"):
        raise ValueError(f"step {state['step']}, eval_split {state.get('eval_split')!r}"[:100])
    for key, pattern in STATE.items():
        if key in state and (wrong := misfit(state[key], pattern, key)):
            raise ValueError(wrong)


def misfit(value: Any, pattern: Pattern, name: str) -> str | None:
    """Return what is wrong with `value`, whose name is `name`; None if it fits `pattern`."""
    if isinstance(pattern, tuple):
        wrong = [misfit(value, choice, name) for choice in pattern]
        return None if None in wrong else wrong[0]
    if isinstance(pattern, dict):
        return misfit_dict(value, pattern, name)
    if isinstance(pattern, list):
        return misfit_list(value, pattern, name)
    if pattern in NUMBER and isinstance(value, NUMBER) and not abs(value) < 2**63:
        return f"{name} is {str(value)[:20]}"
    is_wrong_type = pattern is not None and isinstance(value, bool)
    if pattern is Any or (isinstance(value, pattern or NoneType) and not is_wrong_type):
        return None
    return f"{name} has the type {type(value).__name__}"


def misfit_dict(value: Any, pattern: dict[Any, Pattern], name: str) -> str | None:
    """Return what is wrong with a dict; see `misfit`."""
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        return f"{name} is no dict with texts as keys"
    if str in pattern:
        pattern = dict.fromkeys(value, pattern[str])
    if value.keys() != pattern.keys():
        return f"{name} has the keys {', '.join(value)}"
    parts = (misfit(value[key], pattern[key], f"{name}.{key}") for key in pattern)
    return next(filter(None, parts), None)


def misfit_list(value: Any, pattern: list[Pattern], name: str) -> str | None:
    """Return what is wrong with a list; see `misfit`."""
    if not isinstance(value, list):
        return f"{name} has the type {type(value).__name__}"
    patterns = pattern if len(pattern) > 1 else pattern * len(value)
    if len(value) != len(patterns):
        return f"{name} has {len(value)} items"
    parts = (
        misfit(item, patterns[number], f"{name}[{number}]") for number, item in enumerate(value)
    )
    return next(filter(None, parts), None)
