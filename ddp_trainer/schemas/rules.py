"""What a broken rule raises, and the small words that schemas check themselves with."""

from __future__ import annotations

from typing import Any

RULES = {
    "num_threads": "auto or 1 to 1024",
    "channels_last": "auto, true or false",
    "sync.bucket_cap_mb": "auto or a whole number greater than 0",
}
"""What the keys that take more than one type must be."""


class ConfigError(ValueError):
    """The user's input breaks a rule. ``str(error)`` is the whole message: key, value, rule, way out."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_positive(key: str, value: float | None) -> None:
    """Refuse zero and negative values of `key`; None means "not set" and passes."""
    require(value is None or value > 0, f"{key}={value} must be greater than 0")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return ``{"optimizer.lr": 0.1, …}`` from nested dicts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
