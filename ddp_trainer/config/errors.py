"""Errors for invalid input, and config fields, whose metadata has the rules for their values."""

import errno
import math
import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

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
"""Values of errno whose cause the user can change; the cause of other errors may go away."""
FREE = {"free": True, "unnamed": True}
"""Metadata of a key that a resumed run may change, because it does not change the training."""
NAMED = {"free": True}
"""Metadata of a free key that sweeps may vary, because it is in the names of a sweep's jobs."""

T = TypeVar("T")


def setting(default: T, metadata: Mapping[str, Any] | None = None) -> T:
    """Return a dataclass field; each object of the dataclass gets a copy of `default`."""
    declaration: Any = field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return declaration


def rule(words: str, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """Return metadata for a field whose value must be null or satisfy `holds`.

    words: the rule in messages, after "must be".
    """
    return {"must_be": words, "holds": holds}


POSITIVE = rule("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = rule("0 or more", lambda value: value >= 0)
UP_TO_ONE = rule("in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_ONE = rule("in [0, 1)", lambda value: 0 <= value < 1)


class ConfigError(ValueError):
    """The user's input is wrong; ``str(error)`` is the whole message: key, value, rule and fix."""


class TransientError(RuntimeError):
    """A run cannot start now, but may later; ``str(error)`` is the whole message. Exit code 1."""


def path_error(error: OSError, message: str) -> ConfigError | TransientError:
    """Return a ConfigError if the user can change the cause of `error`, else a TransientError."""
    return ConfigError(message) if error.errno in USER_ERRORS else TransientError(message)


class JobError(Exception):
    """A job of a sweep failed in its own processes; its launcher has already printed the error."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def check_values(section: Any, prefix: str = "") -> None:
    """Check the values of a config object and of its sections; ConfigError if one breaks a rule."""
    for item in fields(section):
        value = getattr(section, item.name)
        key = f"{prefix}{item.name}"
        holds = item.metadata.get("holds")
        require(
            value is None or holds is None or holds(value),
            f"{key}={value} must be {item.metadata.get('must_be')}",
        )
        parts = {key: value}
        if isinstance(value, list | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            parts = {f"{key}.{name}": part for name, part in items}
        for name, part in parts.items():
            if is_dataclass(part):
                check_values(part, f"{name}.")
            _check_plain(part, f"{key}={value}")


def _check_plain(value: Any, text: str) -> None:
    require(not isinstance(value, list), f"{text} must not contain lists")
    require(not isinstance(value, float) or math.isfinite(value), f"{text} must be finite")
    require(not isinstance(value, int) or abs(value) < 2**63, f"{text} must be below 2^63")


def printable(text: str) -> str:
    """Return `text` on one line, with escapes in place of characters that cannot be printed."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ``: did you mean …?`` with names in `known` that are similar to `word`, or ""."""
    lower = {name.lower(): name for name in known}
    near = [lower[name] for name in get_close_matches(word.lower(), lower, n=3, cutoff=0.5)]
    return f": did you mean {' or '.join(near)}?" if near else ""


def require_run_dir(run_dir: Path) -> None:
    """Check that `run_dir` has config.yaml or checkpoints/; ConfigError if it has neither."""
    require(
        os.path.isfile(run_dir / "config.yaml") or os.path.isdir(run_dir / "checkpoints"),
        f"{run_dir} is not a run directory: it has neither config.yaml nor checkpoints/",
    )


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys, for example ``{"optimizer.lr": 0.1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
