"""Values from files as checked numbers, and as text for the report."""

import math
import reprlib

MAX_TEXT = 500
"""Maximum characters of a name or a path in the report."""
SHORT = reprlib.Repr()
SHORT.maxlevel = 2  # because a few lines of YAML aliases make deeply nested lists
SHORT.maxlist = 50
UNKNOWN = "—"


def number(value: object) -> float | None:
    """Return `value` if it is a finite number of magnitude at most 1e300, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        return None
    return value if math.isfinite(value) else None


def whole(value: object) -> int | None:
    """Return `value` if it is an int from 0 to 2**53 - 1, else None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**53 else None


def text(value: object, *, length: int = MAX_TEXT) -> str:
    """Return a value as text of at most `length` characters; "" for None."""
    shown = value if isinstance(value, str) else "" if value is None else SHORT.repr(value)
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"


def format_number(value: object) -> str:
    """Return a number as text, for example 12,345 or 0.001235; a dash if it is not a number."""
    finite = number(value)
    if finite is None:
        return UNKNOWN
    return f"{finite:,.0f}" if 1000 <= abs(finite) < 1e9 else f"{finite:.4g}"


def format_share(value: object) -> str:
    """Return a share in [0, 1] as a percentage; a dash if it is not a number."""
    finite = number(value)
    return UNKNOWN if finite is None else f"{100 * finite:.2f} %"
