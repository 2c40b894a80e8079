"""Format numbers, which come from files, as text for the report."""

from datetime import timedelta

from ddp_trainer.tools.folder_reader import number

UNKNOWN = "—"


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


def format_duration(seconds: object) -> str:
    """Return a duration as text, for example ``1:02:05``; "" if it is unknown."""
    known = number(seconds)
    return str(timedelta(seconds=round(known))) if known and 0 < known < 1e9 else ""
