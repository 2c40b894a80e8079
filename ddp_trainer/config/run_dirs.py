"""Run directories: what is one, and which of them a user may have meant."""

import os
import stat
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ddp_trainer.config.errors import ConfigError, require

MAX_SUGGESTIONS = 3
"""The largest number of run directories that a message lists."""
MAX_BRACKETS = 2000
"""How many brackets a YAML file may have."""


def require_run_dir(run_dir: Path) -> None:
    """Check that `run_dir` has config.yaml or checkpoints/; ConfigError if it has neither."""
    if not is_run_dir(run_dir):
        raise ConfigError(
            f"{run_dir} is not a run directory: it has neither config.yaml nor checkpoints/"
            + other_runs(run_dir)
        )


def is_run_dir(path: Path) -> bool:
    """Return whether `path` has config.yaml or checkpoints/."""
    return os.path.isfile(path / "config.yaml") or os.path.isdir(path / "checkpoints")


def other_runs(path: Path) -> str:
    """Return ``; did you mean …?`` with run directories that the user may have meant, or "".

    These are the run directories in `path`; if there are none, the one that has `path`, such as
    one of its checkpoints; or those with a similar name beside `path` and in outputs/, the default
    of output_dir.
    """
    related = run_dirs_in(path) or [*filter(is_run_dir, [path.parent, path.parent.parent])]
    beside = [run for folder in (path.parent, "outputs") for run in run_dirs_in(Path(folder))]
    near = get_close_matches(path.name, [run.name for run in beside], cutoff=0.5)
    similar = [run for run in beside if run.name in near]
    found = " or ".join(str(run) for run in dict.fromkeys((related or similar)[:MAX_SUGGESTIONS]))
    return found and f"; did you mean {found}?"


def run_dirs_in(folder: Path) -> list[Path]:
    """Return the run directories in `folder`, or [] if it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if is_run_dir(path))
    except OSError:
        return []


def check_links(run_dir: Path) -> None:
    """Check that all files in `run_dir`, which may come from somebody else, are really in it.

    Folders called wandb are not checked.

    Raises:
        ConfigError: a link leads out of `run_dir`, or a file has another name elsewhere, so that a
            write would change a file outside; or there is a pipe or a device, which may never end.
    """
    root = Path(os.path.realpath(run_dir))
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(folder, name)
            # not Path.resolve, which raises an exception for a loop of links
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                raise ConfigError(
                    f"{path} is a link that leads out of the run directory, to {path.readlink()}:"
                    " remove it; to use another disk, set output_dir"
                )
            check_file(path)
        if "wandb" in names:
            names.remove("wandb")  # not checked, because wandb itself makes links to its cache


def check_file(path: Path) -> None:
    """Check that `path` is a folder, a link, or a file with one name; ConfigError if not."""
    with suppress(FileNotFoundError):  # a temporary file of another process
        status = os.lstat(path)
        is_file = stat.S_ISREG(status.st_mode)
        is_other = not (is_file or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode))
        require(not is_other, f"{path} is not a regular file: remove it")
        require(
            not (is_file and status.st_nlink > 1),
            f"{path} is a hard link, so that a write to it changes another file: replace it by a"
            " copy (cp -r copies a whole run directory)",
        )


def load_yaml(text: str) -> Any:
    """Return the content of a YAML file that may be from somebody else.

    Raises:
        ValueError: it has aliases, because a few of them can make a value endless; or it has more
            than `MAX_BRACKETS` brackets, because nested ones take quadratic time to read.
        yaml.YAMLError: it is not YAML.
    """
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError("it has too many brackets")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise ValueError("it has YAML aliases (*name), which ddp_trainer does not write")
    return yaml.safe_load(text)
