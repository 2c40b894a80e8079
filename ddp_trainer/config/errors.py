"""Errors for invalid input, and rules for the values of config fields, which are stored as the
fields' metadata.
"""

import errno
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

FAILURE = 1
USER_ERROR = 2
"""Exit codes: 1 is for failures that may go away; 2 tells a scheduler not to try again."""
USER_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.EROFS,
    errno.ENOENT,
    errno.EINVAL,
    errno.ELOOP,
    errno.EEXIST,
)
"""Values of errno whose cause the user can change, such as a wrong path; other errors may go away.
"""
FREE = {"free": True}
"""Metadata of a field that a resumed run may change, because it does not change the training."""


def rule(words: str, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """Return metadata for a field whose value must be null or satisfy `holds`; messages name the
    rule by `words`.
    """
    return {"must_be": words, "holds": holds}


POSITIVE = rule("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = rule("0 or more", lambda value: value >= 0)
UP_TO_ONE = rule("in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_ONE = rule("in [0, 1)", lambda value: 0 <= value < 1)


class ConfigError(ValueError):
    """The user's input breaks a rule. ``str(error)`` is the whole message: key, value, rule and
    fix.
    """


class TransientError(RuntimeError):
    """A condition that may go away keeps the run from starting; ``str(error)`` is the whole
    message. Exit code 1.
    """


def path_error(error: OSError, message: str) -> ConfigError | TransientError:
    """Return an error with `message`: ConfigError if the user can change the cause of `error`, else
    TransientError.
    """
    return ConfigError(message) if error.errno in USER_ERRORS else TransientError(message)


class JobError(Exception):
    """A job of a sweep failed in its own processes; its launcher has already printed the error."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def check_values(section: Any, prefix: str = "") -> None:
    """Check all fields of a config object, and of objects inside it; ConfigError if a value breaks
    its rule.
    """
    for field in fields(section):
        value = getattr(section, field.name)
        key = f"{prefix}{field.name}"
        holds = field.metadata.get("holds")
        require(
            value is None or holds is None or holds(value),
            f"{key}={value} must be {field.metadata.get('must_be')}",
        )
        parts = (
            value
            if isinstance(value, dict)
            else dict(enumerate(value))
            if isinstance(value, list)
            else {"": value}
        )
        for name, part in parts.items():
            if is_dataclass(part):
                check_values(part, f"{key}.{name}.".replace("..", "."))
            require(not isinstance(part, list), f"{key}={value} must not contain lists")
            require(
                not isinstance(part, float) or math.isfinite(part), f"{key}={value} must be finite"
            )
            require(
                not isinstance(part, int) or abs(part) < 2**63, f"{key}={value} must be below 2^63"
            )


def printable(text: str) -> str:
    """Return `text` as one line, with escapes, as in `repr`, for characters that do not print."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ``: did you mean …?`` with the names in `known` that are spelled like `word`; "" if
    there are none.
    """
    lower = {name.lower(): name for name in known}
    near = [lower[name] for name in get_close_matches(word.lower(), lower, n=3, cutoff=0.5)]
    return f": did you mean {' or '.join(near)}?" if near else ""


def require_run_dir(run_dir: Path) -> None:
    """Check that `run_dir` has config.yaml or checkpoints/, as the directory of a run has;
    ConfigError if not.
    """
    is_run_dir = os.path.isfile(run_dir / "config.yaml") or os.path.isdir(run_dir / "checkpoints")
    require(
        is_run_dir, f"{run_dir} is not a run directory: it has neither config.yaml nor checkpoints/"
    )


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys, for example ``{"optimizer.lr": 0.1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten_keys(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {prefix + key: value}
        )
    return flat
