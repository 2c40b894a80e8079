"""Creates and locks a run directory, and compares its config with that of a new launch."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from ddp_trainer.config.composition import training_changes
from ddp_trainer.config.errors import ConfigError, one_line, path_error, require
from ddp_trainer.config.run_dirs import check_file, check_links, load_yaml
from ddp_trainer.config.schema import Resume
from ddp_trainer.files import lock_file, open_to_append, remove_unfinished, replace_text

LOCK_SECONDS = 3.0
"""How long a launch waits for the lock: a killed launch may need a moment to release it."""


@contextmanager
def lock_run_dir(
    run_dir: Path, config: dict[str, Any], *, resume: Resume, marker: str = ""
) -> Iterator[Path | None]:
    """Create and lock `run_dir`, and write `config` to config.yaml; unlock when the context ends.

    marker: the name of a file in `run_dir` that is removed.

    With resume=never, a directory with the results of a run is renamed first. Yields the new path
    of the renamed directory, or None. The lock is a file beside the directory, because the
    directory may be renamed. The kernel releases the lock when this process ends. Only rank 0 calls
    this.

    Raises:
        ConfigError: `run_dir` cannot be written, has a link that leads out of it, has no checkpoint
            although resume=must, or has a checkpoint of another config.
        TransientError: another launch is running in `run_dir`, or the file system fails or has no
            locks.
    """
    require(
        resume is not Resume.must or has_checkpoint(run_dir),
        f"resume=must needs a checkpoint and {run_dir} has none: check name and output_dir, or use"
        " resume=auto",
    )
    place = Path(os.path.realpath(run_dir))  # the same for each link to it
    lock = place.with_name(f".{place.name}.lock")
    holder = f"another launch is running in {run_dir}: wait for it, stop it, or choose name=…"
    with ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(lock, seconds=LOCK_SECONDS, holder=holder))
            backup_dir = None
            if resume is Resume.never and has_results(run_dir):
                names = (run_dir.with_name(f"{run_dir.name}.old-{number}") for number in count(1))
                backup_dir = run_dir.rename(next(path for path in names if not path.exists()))
            run_dir.mkdir(exist_ok=True)
            check_links(run_dir)
            remove_unfinished(run_dir)
            check_config_file(run_dir, config)
            checkpoints = run_dir / "checkpoints"
            require(
                not checkpoints.exists() or checkpoints.is_dir(),
                f"{checkpoints} must be a folder: remove the file of that name",
            )
            if checkpoints.exists():
                tempfile.TemporaryFile(dir=checkpoints).close()
            if marker:
                (run_dir / marker).unlink(missing_ok=True)
            replace_text(run_dir / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        except OSError as error:
            problem = "there is a file of that name" if error.errno == errno.EEXIST else error
            raise path_error(
                error,
                f"output_dir={run_dir.parent} must be a folder that can be written: {problem}",
            ) from error
        yield backup_dir


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether `run_dir` has a checkpoint step-*.pt, damaged or not; best.pt is ignored."""
    return any((run_dir / "checkpoints").glob("step-*.pt"))


def has_results(run_dir: Path) -> bool:
    """Return whether a training has begun in `run_dir`: it has more than a launch writes before."""
    records = run_dir / "metrics.jsonl"
    return (
        os.path.lexists(run_dir / "checkpoints")
        or (run_dir / "summary.json").exists()
        or (records.exists() and records.stat().st_size > 0)
    )


def check_config_file(run_dir: Path, config: dict[str, Any]) -> None:
    """Check that `config` leads to the same training as config.yaml, if `run_dir` has a checkpoint.

    Raises ConfigError if a key that changes the training differs, or if config.yaml is damaged.
    """
    path = run_dir / "config.yaml"
    if not (has_checkpoint(run_dir) and path.exists()):
        return
    try:
        check_changes(load_yaml(path.read_text()), config, run_dir=run_dir)
    except (ConfigError, OSError):  # an error of the file system may go away
        raise
    except Exception as error:  # a damaged file, or sections of a wrong type, may raise anything
        raise ConfigError(
            f"{path} is not the config of a run ({one_line(error)}): restore it, or start anew with"
            " resume=never"
        ) from error


def check_changes(old: dict[str, Any], new: dict[str, Any], *, run_dir: Path) -> None:
    """Check that two configs lead to the same training; if not, ConfigError names the keys."""
    changes = training_changes(old, new)
    require(
        not changes,
        f"{run_dir} holds a run of another config ({'; '.join(changes)}): set these keys to their"
        " old values to continue it, choose name=… for a new run, or resume=never to start from"
        " step 0 (the old directory is renamed)",
    )


def exclude_node(run_dir: Path, node: str) -> None:
    """Exclude `node` from the next launch by launch/slurm.sbatch; a failed write is ignored."""
    path = run_dir / "excluded_nodes"
    with suppress(OSError, ConfigError):
        run_dir.mkdir(parents=True, exist_ok=True)
        check_file(path)  # because this may come before `check_links`
        with open_to_append(path) as file:
            file.write(f"{node}\n".encode())
