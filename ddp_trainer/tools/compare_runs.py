"""Compares two runs bit by bit: the checkpoints and the records of equal steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, read_state
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.tools.folder_reader import FolderReader

PARTS = ("model", "ema", "optimizer", "scaler", "progress")
"""The entries of a checkpoint that are compared."""
CLOCK = "seconds"
"""An entry of the progress that differs between equal runs."""
TAGS = ("train/", "eval/", "samples/", "optim/")
"""The beginnings of the tags whose values are compared."""


def compare_runs(first: Path, second: Path) -> dict[str, list[str]]:
    """Return for "checkpoints" and "records" a list with the first difference; []: no difference.

    Raises:
        ConfigError: no step has a checkpoint in both runs, or a checkpoint is damaged.
    """
    return {
        "checkpoints": list(checkpoint_difference(first, second)),
        "records": list(record_difference(first, second)),
    }


def checkpoint_difference(first: Path, second: Path) -> Iterator[str]:
    """Yield the step and the tensor that differ in the first checkpoint that does."""
    names = {path.name for path in first.glob("checkpoints/step-*.pt")}
    common = sorted(names & {path.name for path in second.glob("checkpoints/step-*.pt")})
    if not common:
        raise ConfigError(
            f"{first} and {second} have no checkpoint of the same step: train both to the same step"
        )
    for name in common:
        one, other = (read(run_dir / "checkpoints" / name) for run_dir in (first, second))
        if different := difference(one, other):
            yield f"step {one['step']}: {different} differs, in {name}"
            return


def read(path: Path) -> State:
    """Return the state in a checkpoint; ConfigError if it is damaged."""
    try:
        return read_state(path)
    except DamagedCheckpointError as error:
        raise ConfigError(
            f"{path} {error}: run python -m ddp_trainer verify {path.parents[1]}"
        ) from error


def difference(one: State, other: State) -> str | None:
    """Return the name of the first value that differs, such as ``model.0.weight``, or None."""
    left, right = (leaves({part: state.get(part) for part in PARTS}) for state in (one, other))
    if unpaired := left.keys() ^ right.keys():
        return min(unpaired)
    return next((name for name in left if not are_equal(left[name], right[name])), None)


def leaves(state: State) -> dict[str, Any]:
    """Return all values in nested dicts and lists by the names of their keys, with dots between."""
    pairs, _ = tree_flatten_with_path(state)
    named = {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): value
        for path, value in pairs
    }
    return {name: value for name, value in named.items() if name.rpartition(".")[2] != CLOCK}


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors bit by bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_same_kind = one.dtype == other.dtype and one.shape == other.shape
        return is_same_kind and bits(one).equal(bits(other))
    return type(one) is type(other) and one == other


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [n]: -0 differs from 0, and NaN may equal NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def record_difference(first: Path, second: Path) -> Iterator[str]:
    """Yield what is wrong with metrics.jsonl, and the first value that differs."""
    readers = [FolderReader(run_dir) for run_dir in (first, second)]
    one, other = map(values_by_step, readers)
    for reader in readers:
        yield from (f"{reader.folder}: {problem}" for problem in reader.problems)
    common = sorted(one.keys() & other.keys())
    if not common and (one or other):
        yield f"{first} and {second} have no record of the same step in metrics.jsonl"
    for step in common:
        for tag in sorted(one[step].keys() | other[step].keys()):
            values = [found[step].get(tag) for found in (one, other)]
            if values[0] != values[1]:
                yield f"step {step}: {tag} is {values[0]} and {values[1]}"
                return


def values_by_step(reader: FolderReader) -> dict[int, dict[str, Any]]:
    """Return the values of training and evaluation in metrics.jsonl, by step and tag."""
    found: dict[int, dict[str, Any]] = {}
    for record in reader.read_json_lines("metrics.jsonl"):
        values = {tag: value for tag, value in record.items() if tag.startswith(TAGS)}
        if values:
            found.setdefault(record["step"], {}).update(values)
    return found
