"""The memory of ranks, and a warning if that of a rank grows."""

import logging
import os
import resource
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)

MIB = 2**20
GROWTH_EPOCHS = 5
"""A rank gets a warning if its memory has grown in each of so many epochs in a row, and enough."""
GROWTH_MB = 64.0
GROWTH_SHARE = 0.1
"""Growth is enough if it is at least so many MiB, and this share of the memory before it."""


class Memory(Observer):
    """Logs peak memory, and warns about memory that grows in every epoch."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.epoch: int | None = None
        self.memory: list[Tensor] = []
        """The MiB of all ranks at the ends of epochs; the last entry is the current epoch's."""

    def on_start(self, run: TrainingRun) -> None:
        self.hosts = run.world.all_gather_object(socket.gethostname())
        if run.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.world.device)

    def rank_values(self, run: TrainingRun) -> Sequence[float]:
        device = run.world.device
        return current_memory_mb(device), peak_memory_mb(device)

    def on_log(self, run: TrainingRun) -> None:
        run.log({"memory/peak_mb": peak_memory_mb(run.world.device)})
        numbers = run.gathered(self)
        if not numbers.numel():
            return
        memory, peak = numbers.unbind(1)
        run.log({"memory/max_peak_mb": float(peak.max()), "memory/max_rank": int(peak.argmax())})
        if run.world.is_main:
            self.warn_of_growth(memory, run.epoch)

    def warn_of_growth(self, memory_mb: Tensor, epoch: int) -> None:
        """Log a warning for a rank whose memory grows in every epoch. memory_mb: float64 [W]."""
        growth = self.find_growth(memory_mb, epoch)
        if growth is not None:
            rank, before, now = growth
            logger.warning(
                "the memory of rank %d on %s has grown in each of the last %d epochs, from %s to "
                "%s MiB: some code keeps objects that are no longer needed, for example losses as "
                "tensors (keep loss.item() instead)",
                rank,
                self.hosts[rank],
                GROWTH_EPOCHS,
                f"{before:,.0f}",
                f"{now:,.0f}",
            )

    def find_growth(self, memory_mb: Tensor, epoch: int) -> tuple[int, float, float] | None:
        """Return a rank whose memory has grown in each of the last epochs, its MiB then and now.

        memory_mb: the MiB of all ranks, float64 [W]. After a result, epochs count from 0 again.
        """
        if epoch == self.epoch:
            self.memory[-1] = memory_mb
            return None
        self.epoch = epoch
        whole = self.memory[-GROWTH_EPOCHS - 1 :]
        self.memory = [*whole, memory_mb]
        if len(whole) <= GROWTH_EPOCHS:
            return None

        growth = torch.stack(whole).diff(dim=0)
        total = growth.sum(0)
        enough = (GROWTH_SHARE * whole[0]).clamp(min=GROWTH_MB)
        grown = torch.where((growth > 0).all(0) & (total >= enough), total, 0.0)
        rank = int(grown.argmax())
        if not grown[rank]:
            return None
        self.memory = self.memory[-1:]
        return rank, float(whole[0][rank]), float(whole[-1][rank])


def peak_memory_mb(device: torch.device) -> float:
    """Return this rank's peak in MiB: on a GPU what torch allocated, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def current_memory_mb(device: torch.device) -> float:
    """Return this rank's memory in MiB: on a GPU what torch allocated, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MIB
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB
