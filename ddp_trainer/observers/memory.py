"""The memory of ranks: now, at its peak, and whether it grows from epoch to epoch."""

import os
import resource
from pathlib import Path

import torch
from torch import Tensor

MIB = 2**20
GROWTH_EPOCHS = 5
"""A rank gets a warning if its memory has grown in each of so many epochs in a row, and enough in
total.
"""
GROWTH_MB = 64.0
GROWTH_SHARE = 0.1
"""Growth is enough if it is at least so many MiB, and at least this share of the memory before
these epochs.
"""


def reset_peak_memory(device: torch.device) -> None:
    """On a GPU, reset the peak that `peak_memory_mb` returns; on a CPU, do nothing."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak of this rank's memory in MiB: on a GPU what torch allocated, else resident
    memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def current_memory_mb(device: torch.device) -> float:
    """Return this rank's memory in MiB: on a GPU what torch has allocated, else resident memory (0
    if unknown).
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MIB
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


class MemoryGrowth:
    """Finds the rank whose memory grows in every epoch, for example because tensors are never
    freed.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.ends: list[Tensor] = []
        """The memory of all ranks at the ends of epochs; the last entry is the newest value of the
        current epoch.
        """

    def add(self, epoch: int, memory_mb: Tensor) -> tuple[int, float, float] | None:
        """Add the MiB of all ranks, float64 [W]. Return a rank whose memory grows, its MiB before
        and now; or None.

        The memory of the rank has grown in each of the last GROWTH_EPOCHS epochs. After such a
        result, the epochs are counted from 0 again.
        """
        if epoch == self.epoch:
            self.ends[-1] = memory_mb
            return None
        whole = self.ends[-GROWTH_EPOCHS - 1 :]
        self.epoch = epoch
        self.ends = [*whole, memory_mb]
        if len(whole) <= GROWTH_EPOCHS:
            return None
        growth = torch.stack(whole).diff(dim=0)
        enough = (GROWTH_SHARE * whole[0]).clamp(min=GROWTH_MB)
        grown = torch.where((growth > 0).all(0) & (growth.sum(0) >= enough), growth.sum(0), 0.0)
        rank = int(grown.argmax())
        if not grown[rank]:
            return None
        self.ends = self.ends[-1:]
        return rank, float(whole[0][rank]), float(whole[-1][rank])
