"""The error that a broken rule raises, and the checks that schemas use."""

from typing import Any

FAILURE, USER_ERROR = 1, 2
"""Exit codes: 2 tells a scheduler not to try again; a condition that may go away is 1."""
MUST_BE = "must_be"
"""The key of a field's metadata that says what its value must be, where the type alone does not."""
FREE = "free"
"""The key of a field's metadata that says that a resumed run may have another value."""


class ConfigError(ValueError):
    """The user's input breaks a rule. ``str(error)`` is the whole message: key, value, rule and fix."""


class TransientError(RuntimeError):
    """A condition that may go away keeps the run from starting; ``str(error)`` is the whole message. Exit code 1."""


class JobError(Exception):
    """A job of a sweep failed in processes of its own; its launcher has reported it already."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_positive(key: str, value: float | None) -> None:
    """Refuse zero and negative values of `key`; None means "not set" and passes."""
    require(value is None or value > 0, f"{key}={value} must be greater than 0")


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"optimizer.lr": 0.1, …}`` from nested dicts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
