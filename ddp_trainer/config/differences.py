"""The differences between two configs, or between the versions or data of two ranks or nodes."""

from collections.abc import Mapping
from typing import Any


def differing_keys(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys, sorted, that have another value in `other`, or are in one of both only."""
    keys = sorted(first.keys() | other.keys())
    return [key for key in keys if first.get(key) != other.get(key)]


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return ``"key: first → other"`` for each of the `differing_keys`."""
    return [
        f"{key}: {first.get(key, 'absent')} → {other.get(key, 'absent')}"
        for key in differing_keys(first, other)
    ]
