"""Errors for invalid input, and config fields with metadata: rules for values, FREE and NAMED."""

import errno
import math
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, dataclass_transform

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
"""Values of errno for errors whose cause the user must remove; other errors may go away."""
FREE = {"free": True, "unnamed": True}
"""Metadata of a key that a resumed run may change. The name of a sweep's job contains the key only
if the sweep varies it.
"""
NAMED = {"free": True}
"""Metadata of a key that a resumed run may change. A sweep job's name has all its overrides."""

T = TypeVar("T")


@dataclass_transform(kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """Return `cls` as a dataclass with slots and keyword-only arguments; a class decorator."""
    return dataclass(kw_only=True, slots=True)(cls)


def setting(default: T, metadata: Mapping[str, Any] | None = None) -> T:
    """Return a dataclass field; each object of the dataclass gets a copy of `default`."""
    declaration: Any = field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return declaration


def rule(words: str, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """Return metadata for a field whose value must be null or satisfy `holds`.

    words: the text of the rule, which follows "must be" in messages.
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
    """Return a ConfigError if `error` is one of `USER_ERRORS`, else a TransientError."""
    return ConfigError(message) if error.errno in USER_ERRORS else TransientError(message)


class JobError(Exception):
    """A job of a sweep failed in its own processes; its launcher has already printed the error."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def check_values(section: Any, prefix: str = "") -> None:
    """Check a config object and its sections; ConfigError if a value breaks its field's rule."""
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
    match value:
        case list():
            raise ConfigError(f"{text} must not contain lists")
        case float() if not math.isfinite(value):
            raise ConfigError(f"{text} must be finite")
        case int() if abs(value) >= 2**63:
            raise ConfigError(f"{text} must be between -2^63 and 2^63")


def printable(text: str) -> str:
    """Return `text` on one line: unprintable characters are escaped, as in `repr`."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def escape_controls(text: str) -> str:
    """Return `text` with control characters escaped as in `repr`, except newlines and tabs.

    A terminal executes control characters, for example in a class name from a stranger.
    """
    return re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def one_line(text: object) -> str:
    """Return `text` as one line of at most 300 characters, without colors of a terminal."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(text)).split())[:300]


def plural(number: int, noun: str) -> str:
    """Return the number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ``: did you mean …?`` with the names in `known` that are similar to `word`, or "".

    Only the last parts of dotted names are compared.
    """
    names = {name.rpartition(".")[2].lower(): name for name in known}
    near = get_close_matches(word.rpartition(".")[2].lower(), names)
    return f": did you mean {' or '.join(names[name] for name in near)}?" if near else ""
