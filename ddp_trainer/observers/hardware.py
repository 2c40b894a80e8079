"""Hardware: the memory of ranks and whether it grows, temperatures, and slowdowns by heat."""

import logging
import os
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
READ_SECONDS = 10.0
"""The shortest time between two reads of the sensors' files."""


class Hardware(Observer):
    """Logs peak memory and the highest temperature, and warns about growing memory and heat."""

    def __init__(self, sensors: "Sensors") -> None:
        self.sensors = sensors
        self.growth = MemoryGrowth()
        self.is_throttled = False
        self.hosts: list[str] = []

    def on_start(self, run: TrainingRun) -> None:
        self.hosts = run.world.all_gather_object(socket.gethostname())
        reset_peak_memory(run.world.device)

    def rank_values(self, run: TrainingRun) -> Sequence[float]:
        device = run.world.device
        heat = self.sensors.read()
        return current_memory_mb(device), peak_memory_mb(device), heat.celsius, heat.throttled

    def on_log(self, run: TrainingRun) -> None:
        run.log({"memory/peak_mb": peak_memory_mb(run.world.device)})
        numbers = run.gathered(self)
        if not numbers.numel():
            return
        memory, peak, celsius, throttled = numbers.unbind(1)
        run.log({"memory/max_peak_mb": float(peak.max()), "memory/max_rank": int(peak.argmax())})
        if celsius.any():
            hottest = int(celsius.argmax())
            run.log({"temperature/max_celsius": float(celsius[hottest])})
            run.log({"temperature/max_rank": hottest})
        if run.world.is_main:
            self.warn_of_growth(memory, run.epoch)
            self.warn_of_heat(celsius, throttled, is_cpu=run.world.device.type == "cpu")

    def warn_of_growth(self, memory_mb: Tensor, epoch: int) -> None:
        """Log a warning for a rank whose memory grows in every epoch. memory_mb: float64 [W]."""
        found = self.growth.add(epoch, memory_mb)
        if found is not None:
            logger.warning(
                "the memory of rank %d on %s has grown in each of the last %d epochs, from %s to "
                "%s MiB: some code keeps objects that are no longer needed, for example losses as "
                "tensors (keep loss.item() instead)",
                found.rank,
                self.hosts[found.rank],
                GROWTH_EPOCHS,
                f"{found.before_mb:,.0f}",
                f"{found.now_mb:,.0f}",
            )

    def warn_of_heat(self, celsius: Tensor, throttled: Tensor, *, is_cpu: bool) -> None:
        """Log once that heat slows down a processor. Both are float64 [W]; celsius: 0 if unknown.

        is_cpu: whether `celsius` is that of the processor; on a GPU rank it is that of the GPU.
        """
        if self.is_throttled or not throttled.any():
            return
        self.is_throttled = True
        rank = int(throttled.argmax())
        degrees = f" ({celsius[rank]:.0f} °C)" if is_cpu and celsius[rank] > 0 else ""
        logger.warning("the processor of %s is slowed down by heat%s", self.hosts[rank], degrees)


def reset_peak_memory(device: torch.device) -> None:
    """On a GPU, reset the peak that `peak_memory_mb` returns; on a CPU, do nothing."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


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


class Grown(NamedTuple):
    """A rank whose memory has grown in every one of some epochs."""

    rank: int
    before_mb: float
    now_mb: float


class MemoryGrowth:
    """Finds the rank whose memory grows in every epoch, for example because tensors are kept."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.ends: list[Tensor] = []
        """The memory of all ranks at the ends of epochs; the last entry is the current epoch's."""

    def add(self, epoch: int, memory_mb: Tensor) -> Grown | None:
        """Add the MiB of all ranks, float64 [W]; return a rank whose memory grows, or None.

        Its memory has grown in each of the last GROWTH_EPOCHS epochs. After such a result, the
        epochs are counted from 0 again.
        """
        if epoch == self.epoch:
            self.ends[-1] = memory_mb
            return None
        self.epoch = epoch
        whole = self.ends[-GROWTH_EPOCHS - 1 :]
        self.ends = [*whole, memory_mb]
        if len(whole) <= GROWTH_EPOCHS:
            return None

        growth = torch.stack(whole).diff(dim=0)
        total = growth.sum(0)
        enough = (GROWTH_SHARE * whole[0]).clamp(min=GROWTH_MB)
        grown = torch.where((growth > 0).all(0) & (total >= enough), total, 0.0)
        rank = int(grown.argmax())
        if not grown[rank]:
            return None
        self.ends = self.ends[-1:]
        return Grown(rank, float(whole[0][rank]), float(whole[-1][rank]))


class Heat(NamedTuple):
    """The highest temperature, and how often heat has slowed the processor; 0 if unknown."""

    celsius: float
    throttled: float


class Sensors:
    """The sensors of this rank's device. sys: the folder in which Linux shows them."""

    def __init__(self, device: torch.device, *, sys: Path = Path("/sys")) -> None:
        self.device = device
        self.thermometers = sorted(sys.glob("class/thermal/thermal_zone*/temp"))
        cpus = sys / "devices/system/cpu"
        self.counters = sorted(cpus.glob("cpu*/thermal_throttle/package_throttle_count"))
        self._next = 0.0
        self._last = Heat(0.0, 0.0)
        self._throttled_before = sum(map(read_number, self.counters))

    def read(self) -> Heat:
        """Return the heat now, or that of the last `READ_SECONDS`.

        Slowdowns are counted from the time when this object was made.
        """
        if time.monotonic() >= self._next:
            throttled = sum(map(read_number, self.counters)) - self._throttled_before
            self._last = Heat(self._temperature(), throttled)
            self._next = time.monotonic() + READ_SECONDS
        return self._last

    def _temperature(self) -> float:
        if self.device.type == "cuda":
            with suppress(Exception):  # torch asks NVIDIA's library, whose package may be missing
                return float(torch.cuda.temperature(self.device))
            return 0.0
        return max(map(read_number, self.thermometers), default=0.0) / 1e3


def read_number(path: Path) -> float:
    """Return the number in a file; 0 if it cannot be read, for example because a sensor is off."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0
