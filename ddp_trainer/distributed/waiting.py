"""The mark that this rank waits for other ranks, and its progress, for the failure monitor.

The mark is set where a collective is called, because a stack does not show whether a rank waits:
DDP waits in C++, and with NCCL the host waits where it reads a collective's result.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class _Mark:
    """One for the process, because only the main thread calls collectives."""

    is_set = False
    progress = 0


def record_progress() -> None:
    """Record that this rank makes progress; without any for too long it counts as stuck."""
    _Mark.progress += 1


def progress_count() -> int:
    """Return a number that differs after each `record_progress`."""
    return _Mark.progress


def is_waiting() -> bool:
    """Return whether this rank waits for other ranks now."""
    return _Mark.is_set


def set_waiting(value: bool) -> None:
    """Set or clear the mark, where a wait begins and ends in two callbacks; else use `waiting`."""
    _Mark.is_set = value


@contextmanager
def waiting() -> Iterator[None]:
    """Mark this rank as waiting for other ranks inside the context, which may be inside another.

    Use it around a collective, and around a read of its result from a GPU.
    """
    was_set = _Mark.is_set
    _Mark.is_set = True
    try:
        yield
    finally:
        _Mark.is_set = was_set
