"""Memory: what a step frees is kept for the next one, and what imports leave behind is not searched for garbage."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
LARGEST_MMAP_THRESHOLD = 32 * 2**20


def keep_freed_memory() -> None:
    """Have activations that a step frees reused by the next, instead of returned to the system and faulted in again.

    Without it a block of more than 128 KiB is mapped and unmapped each time, until glibc has happened to learn
    otherwise. Does nothing where there is no glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def without_collection() -> Iterator[None]:
    """Look for no garbage meanwhile, and if torch was imported meanwhile, never among what there is by then.

    Importing torch and its compiler makes some million objects that stay; looking through them again and again as they
    come takes half a second of a start.
    """
    was_enabled, had_torch = gc.isenabled(), "torch" in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if not had_torch and "torch" in sys.modules:  # once: later on there are models that must be found as garbage
            gc.freeze()
        if was_enabled:
            gc.enable()
