"""The run directory, which one launch at a time locks, and resumes with the same config."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from ddp_trainer.config.composition import training_changes
from ddp_trainer.config.errors import ConfigError, path_error, require
from ddp_trainer.config.schema import Resume
from ddp_trainer.files import lock_file, replace_text

LOCK_SECONDS = 3.0
"""How long a launch waits for the lock, because a killed launch may take a moment to end."""
DAMAGE = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""What reading a damaged config.yaml raises, or using its sections and keys of wrong types."""


@contextmanager
def lock_run_dir(run_dir: Path, config: dict[str, Any], *, resume: Resume) -> Iterator[Path | None]:
    """Create and lock `run_dir`, and write `config` to config.yaml.

    With resume=never, a former run is renamed first; yields its new path, else None. A directory
    without a checkpoint accepts any config. The lock is a file beside the directory, which may be
    renamed; the kernel releases it when this process ends. Rank 0 only.

    Raises:
        ConfigError: `run_dir` cannot be written, belongs to another config, or has no checkpoint
        for resume=must.
        TransientError: another launch is running in `run_dir`, or the file system does not answer
        or has no locks.
    """
    require(
        resume is not Resume.must or has_checkpoint(run_dir),
        f"resume=must needs a checkpoint and {run_dir} has none: check name and output_dir, or use"
        " resume=auto",
    )
    lock = run_dir.with_name(f".{run_dir.name}.lock")
    holder = f"another launch is running in {run_dir}: wait for it, stop it, or choose name=…"
    with ExitStack() as stack:
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(lock, seconds=LOCK_SECONDS, holder=holder))
            backup_dir = None
            if resume is Resume.never and run_dir.exists():
                names = (run_dir.with_name(f"{run_dir.name}.old-{number}") for number in count(1))
                backup_dir = run_dir.rename(next(path for path in names if not path.exists()))
            run_dir.mkdir(exist_ok=True)
            check_config_file(run_dir, config)
            replace_text(run_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        except OSError as error:
            problem = "there is a file of that name" if error.errno == errno.EEXIST else error
            raise path_error(
                error,
                f"output_dir={run_dir.parent} must be a folder that can be written: {problem}",
            ) from error
        yield backup_dir


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether `run_dir` has a checkpoint to resume from, good or damaged (not best.pt)."""
    return any((run_dir / "checkpoints").glob("step-*.pt"))


def check_config_file(run_dir: Path, config: dict[str, Any]) -> None:
    """Check that a run with a checkpoint in `run_dir` has been trained with `config`."""
    path = run_dir / "config.yaml"
    if not (has_checkpoint(run_dir) and path.exists()):
        return
    try:
        check_changes(yaml.safe_load(path.read_text()), config, run_dir=run_dir)
    except ConfigError:
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} is not the config of a run ({reason}): restore it, or start anew with"
            " resume=never"
        ) from error


def check_changes(old: dict[str, Any], new: dict[str, Any], *, run_dir: Path) -> None:
    """Check that two configs lead to the same training; ConfigError names the keys that differ."""
    changes = training_changes(old, new)
    require(
        not changes,
        f"{run_dir} holds a run of another config ({'; '.join(changes)}): choose name=… for a new"
        " run, or resume=never to start from step 0 (the old directory is renamed)",
    )
