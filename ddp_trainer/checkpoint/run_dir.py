"""The run directory: locked by one launch at a time, and resumed only with the config that created
it.
"""

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
"""How long a launch waits for the lock: an earlier launch that was killed may take a moment to end.
"""


@contextmanager
def lock_run_dir(run_dir: Path, config: dict[str, Any], *, resume: Resume) -> Iterator[Path | None]:
    """Create and lock `run_dir`, rename a former run first if resume=never, and write `config` to
    config.yaml.

    A directory without a checkpoint accepts any config. The lock is a file beside the directory,
    which may be renamed; the kernel releases it when this process ends. Rank 0 only. Yields the new
    path of the renamed run, or None.

    ConfigError if `run_dir` cannot be written, belongs to another config, or has no checkpoint for
    resume=must; TransientError if another launch is running in `run_dir`, or the file system does
    not answer or has no locks.
    """
    require(
        resume is not Resume.must or has_checkpoint(run_dir),
        f"resume=must needs a checkpoint and {run_dir} has none: check name and output_dir, or use"
        " resume=auto",
    )
    with ExitStack() as stack:
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            holder = (
                f"another launch is running in {run_dir}: wait for it, stop it, or choose name=…"
            )
            lock = run_dir.with_name(f".{run_dir.name}.lock")
            stack.enter_context(lock_file(lock, seconds=LOCK_SECONDS, holder=holder))
            backup_dir = None
            if resume is Resume.never and run_dir.exists():
                names = (run_dir.with_name(f"{run_dir.name}.old-{number}") for number in count(1))
                backup_dir = run_dir.rename(next(path for path in names if not path.exists()))
            run_dir.mkdir(exist_ok=True)
            path = run_dir / "config.yaml"
            if has_checkpoint(run_dir) and path.exists():
                try:
                    check_changes(_read_config(path), config, run_dir=run_dir)
                except (
                    AttributeError,
                    TypeError,
                    RecursionError,
                ) as error:  # a section or a key of a wrong type
                    fix = "restore it, or start anew with resume=never"
                    raise ConfigError(
                        f"{path} is not the config of a run ({error}): {fix}"
                    ) from error
            replace_text(path, yaml.safe_dump(config, sort_keys=False))
        except OSError as error:
            problem = "there is a file of that name" if error.errno == errno.EEXIST else error
            raise path_error(
                error,
                f"output_dir={run_dir.parent} must be a folder that can be written: {problem}",
            ) from error
        yield backup_dir


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether `run_dir` has a checkpoint to resume from, good or damaged: a file step-*.pt
    (best.pt is none).
    """
    return any((run_dir / "checkpoints").glob("step-*.pt"))


def check_changes(old: dict[str, Any], new: dict[str, Any], *, run_dir: Path) -> None:
    """Check that two configs (as builtins) lead to the same training; ConfigError names the keys
    that differ.
    """
    changes = training_changes(old, new)
    require(
        not changes,
        f"{run_dir} holds a run of another config ({'; '.join(changes)}): choose name=… for a new"
        " run, or resume=never to start from step 0 (the old directory is renamed)",
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} cannot be read ({reason}): restore it, or start anew with resume=never"
        ) from error
    require(
        isinstance(config, dict),
        f"{path} must be a YAML mapping: restore it, or start anew with resume=never",
    )
    return config
