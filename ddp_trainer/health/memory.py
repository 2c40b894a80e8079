"""The memory of this rank: now, at its peak, and whether it grows from epoch to epoch."""

import os
import resource
from pathlib import Path

import torch

MIB = 2**20


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory_mb` returns on a GPU; that of resident memory cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak of this rank's memory in MiB: on a GPU what torch allocated, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def current_memory_mb(device: torch.device) -> float:
    """Return this rank's memory in MiB: on a GPU what torch has allocated, else resident memory (0 if unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MIB
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB
