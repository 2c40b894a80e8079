"""The run directory: claimed by one launch at a time, and only for the config that it was made for."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ddp_trainer.composition import to_builtins, training_changes
from ddp_trainer.config import Config, ConfigError, Resume, require
from ddp_trainer.files import replace_text

LOCK = ".lock"
PATIENCE_SECONDS = 3.0
"""How long a launch waits for the lock: a killed predecessor may take a moment to be gone."""


@contextmanager
def claimed(run_dir: Path, config: Config) -> Iterator[Path | None]:
    """Make `run_dir` ours: created, locked, moved aside first if resume=never, and holding our config.yaml.

    A directory without a checkpoint keeps nothing of a run that could be lost, and takes any config.

    Yields where a former run was moved to, if one was: the log has no file yet that could tell of it.
    The kernel drops the lock when this process ends, however it ends. Rank 0 only.

    Raises:
        ConfigError: it cannot be written, another launch is in it, it belongs to another config, or resume=must
            finds no checkpoint in it.
    """
    require(
        config.resume is not Resume.must or _has_checkpoint(run_dir),
        f"resume=must needs a checkpoint and {run_dir} has none: check name and output_dir, or use resume=auto",
    )
    try:
        lock, aside = _claim(run_dir, config)
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir} must be a folder that can be written: {error}") from error
    try:
        yield aside
    finally:
        os.close(lock)


def _claim(run_dir: Path, config: Config) -> tuple[int, Path | None]:
    lock, aside = _lock(run_dir), None
    try:
        if config.resume is Resume.never and _is_used(run_dir):
            aside = _move_aside(run_dir)
            os.close(lock)
            lock = _lock(run_dir)
        _check_config(run_dir, config)
    except BaseException:
        os.close(lock)
        raise
    return lock, aside


def _lock(run_dir: Path) -> int:
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"another launch is running in {run_dir}: wait for it, stop it, or choose name=…"
                ) from None
            time.sleep(0.1)


def _has_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("step-*.pt"))


def _is_used(run_dir: Path) -> bool:
    return any(entry.name != LOCK for entry in run_dir.iterdir())


def _move_aside(run_dir: Path) -> Path:
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.old-{number}")).exists():
        number += 1
    return run_dir.rename(aside)


def _check_config(run_dir: Path, config: Config) -> None:
    path, new = run_dir / "config.yaml", to_builtins(config)
    if _has_checkpoint(run_dir) and path.exists() and (changes := training_changes(_read_config(path), new)):
        raise ConfigError(
            f"{run_dir} holds a run of another config ({'; '.join(changes)}): choose name=… for a new run, "
            "or resume=never to start afresh (the old directory is moved aside)"
        )
    replace_text(path, yaml.safe_dump(new, sort_keys=False))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read ({reason}): put it right, or use resume=never") from error
    require(isinstance(config, dict), f"{path} is not the config of a run: put it right, or use resume=never")
    return config
