"""Hardware: the memory of ranks and whether it grows, temperatures, and slowdowns by heat."""

import logging
import os
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
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
READ_SECONDS = 10.0
"""The shortest time between two reads of the sensors' files."""


class Hardware(Observer):
    """Logs peak memory and the highest temperature, and warns about growing memory and heat."""

    def __init__(self, sensors: "Sensors") -> None:
        self.sensors = sensors
        self.is_throttled = False
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
        return current_memory_mb(device), peak_memory_mb(device), *self.sensors.read()

    def on_log(self, run: TrainingRun) -> None:
        run.log({"memory/peak_mb": peak_memory_mb(run.world.device)})
        numbers = run.gathered(self)
        if not numbers.numel():
            return
        memory, peak, celsius, throttled = numbers.unbind(1)
        run.log({"memory/max_peak_mb": float(peak.max()), "memory/max_rank": int(peak.argmax())})
        if celsius.any():
            run.log({"temperature/max_celsius": float(celsius.max())})
            run.log({"temperature/max_rank": int(celsius.argmax())})
        if run.world.is_main:
            self.warn_of_growth(memory, run.epoch)
            self.warn_of_heat(throttled)

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

    def warn_of_heat(self, throttled: Tensor) -> None:
        """Log once that heat slows down a processor. throttled: float64 [W], how often it did."""
        if throttled.any() and not self.is_throttled:
            self.is_throttled = True
            host = self.hosts[int(throttled.argmax())]
            logger.warning("the processor of %s is slowed down by heat", host)


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


class Sensors:
    """The sensors of this rank's device. sys: the folder in which Linux shows them."""

    def __init__(self, device: torch.device, *, sys: Path = Path("/sys")) -> None:
        self.device = device
        self.thermometers = sorted(sys.glob("class/thermal/thermal_zone*/temp"))
        cpus = sys / "devices/system/cpu"
        self.counters = sorted(cpus.glob("cpu*/thermal_throttle/package_throttle_count"))
        self._next = 0.0
        self._last = (0.0, 0.0)
        self._throttled_before = sum(map(read_number, self.counters))

    def read(self) -> tuple[float, float]:
        """Return the highest temperature in °C, and how often heat has slowed the processor.

        Both are 0 if unknown, and those of the last `READ_SECONDS`. Slowdowns are counted from the
        time when this object was made.
        """
        if time.monotonic() >= self._next:
            throttled = sum(map(read_number, self.counters)) - self._throttled_before
            self._last = (self._temperature(), throttled)
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
