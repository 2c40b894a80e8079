"""Checkpoints with a good checksum and bad contents: one error, and never a traceback."""

import copy
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from runs import TINY, compose, train_on

from ddp_trainer.checkpoint.file import (
    DamagedCheckpointError,
    State,
    read_state,
    write_file,
)
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.tools.trained_model import load_model
from ddp_trainer.training_run import run

WRONG: list[Any] = [None, True, -3, 10**30, 2.5, "x", [], {}, [[]], {1: 2}, torch.zeros(0), b"x"]

MANY = ("optimizer", "model", "ema")
"""Entries with many parts of one kind."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_on(1, *TINY, f"output_dir={folder}", "name=run", "max_steps=3", "ema.decay=0.9")
    return folder / "run"


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*.pt"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys and indices that lead to each part of `value`."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(state: State, path: tuple[Any, ...], value: Any) -> State:
    """Return a copy of `state` with `value` at `path`."""
    state = copy.deepcopy(state)
    part: Any = state
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return state


def load(folder: Path) -> str:
    """Load the model of a run; return the error text, or the loaded evaluation."""
    try:
        loss, top1, count = load_model(folder, "last").evaluation
        return f"{loss} {top1} {count:,}"
    except ConfigError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_wrong_value_of_a_checkpoint_is_a_traceback_for_the_tools(
    run_dir: Path, tmp_path: Path
) -> None:
    state = read_state(newest(run_dir))
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    file = folder / "checkpoints" / newest(run_dir).name
    parts = [path for path in places(state) if not (path[0] in MANY and len(path) > 2)]
    parts = parts[::2]
    for path, value in zip(parts, WRONG * 100, strict=False):
        write_file(file, changed(state, path, value))
        assert "\n" not in load(folder), (path, value)
    assert len(parts) > 60


def resume_each(folder: Path, source: Path) -> list[tuple[str, str]]:
    """Resume a run with a wrong value at each place; return the places and what they ended in."""
    state = read_state(source)
    paths = [path for path in places(state) if len(path) in (1, 2) and path[0] != "config"]
    paths += [
        path
        for path in places(state["optimizer"], ("optimizer",))
        if len(path) > 2 and (path[1] == "param_groups" or path[2] == 0)
    ]
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    outcomes = []
    for path, value in zip(paths[::2], WRONG * 20, strict=False):
        write_file(checkpoints / source.name, changed(state, path, value))
        try:
            run(compose(*TINY, f"output_dir={folder}", "ema.decay=0.9", "max_steps=4"), folder)
            outcomes.append((f"{path} {value}", "trained"))
        except ConfigError as error:
            outcomes.append((f"{path} {value}", str(error)))
        for file in checkpoints.iterdir():
            file.unlink()
    return outcomes


def test_no_wrong_value_of_a_checkpoint_is_a_traceback_for_a_resume(
    run_dir: Path, tmp_path: Path
) -> None:
    arguments: tuple[Path, Path] = (tmp_path / "run", newest(run_dir))
    [outcomes] = on_ranks(1, resume_each, *arguments, deadline=200)
    assert len(outcomes) > 20
    for place, outcome in outcomes:
        is_named = "checkpoint" in outcome or "step-" in outcome
        assert outcome == "trained" or is_named, (place, outcome)
        assert "\n" not in outcome, place


def test_a_compressed_archive_is_refused_before_it_fills_the_memory(
    run_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "step-00000003.pt"
    state = read_state(newest(run_dir)) | {"ema": None, "model": {"w": torch.zeros(10**7)}}
    write_file(file, state)
    stored = tmp_path / "stored.zip"
    stored.write_bytes(file.read_bytes())
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member.filename))
    assert file.stat().st_size < 10**6
    sign(file)
    with pytest.raises(DamagedCheckpointError, match="compressed member"):
        read_state(file)


def test_a_key_that_would_be_hashed_for_years_is_refused(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "step-00000003.pt"
    nested = b"\x80\x02})" + 60 * b"q\x00h\x00\x86" + b"K\x01s."  # (a, a) of (b, b) of …
    with zipfile.ZipFile(newest(run_dir)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, nested if name.endswith("data.pkl") else old.read(name))
    sign(file)
    with pytest.raises(DamagedCheckpointError, match="a tuple of more than 100,000 items"):
        read_state(file)


def sign(file: Path) -> None:
    """Append a good checksum."""
    import hashlib

    from ddp_trainer.checkpoint.file import MAGIC

    content = file.read_bytes()
    file.write_bytes(content + MAGIC + hashlib.sha256(content).digest())


def test_the_state_of_an_observer_may_have_keys_of_any_type(run_dir: Path, tmp_path: Path) -> None:
    state = read_state(newest(run_dir)) | {"observers": {"own": {0: 1, "x": {2: 3}}}}
    write_file(tmp_path / "step-00000003.pt", state)
    assert read_state(tmp_path / "step-00000003.pt")["observers"] == state["observers"]
