"""glibc's malloc, told to keep what is freed."""

from __future__ import annotations

import ctypes
import platform

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
