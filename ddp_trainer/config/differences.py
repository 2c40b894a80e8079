"""Compares two configs, or the versions or data of two ranks or nodes."""

from collections.abc import Collection, Mapping
from typing import Any


def differing_keys(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return, sorted, the keys whose values differ; an absent key counts as a key with None."""
    keys = sorted(first.keys() | other.keys())
    return [key for key in keys if first.get(key) != other.get(key)]


def differences(
    first: Mapping[str, Any], other: Mapping[str, Any], *, ignore: Collection[str] = ()
) -> list[str]:
    """Return ``"key: first → other"`` for each of the `differing_keys` that is not in `ignore`."""

    def shown(values: Mapping[str, Any], key: str) -> object:
        value = values.get(key, "absent")
        return "null" if value is None else value

    return [
        f"{key}: {shown(first, key)} → {shown(other, key)}"
        for key in differing_keys(first, other)
        if key not in ignore
    ]


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys, for example ``{"optimizer.lr": 0.1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
