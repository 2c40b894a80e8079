"""The temperature of this rank's GPU or processor, and whether heat slows down the processor, where
that is known.
"""

import time
from contextlib import suppress
from pathlib import Path

import torch

READ_SECONDS = 10.0
"""The shortest time between two reads of the files."""


class Sensors:
    """The sensors of the device of this rank. sys: the folder in which Linux shows the processor's
    sensors.
    """

    def __init__(self, device: torch.device, *, sys: Path = Path("/sys")) -> None:
        self.device = device
        self.thermometers = sorted(sys.glob("class/thermal/thermal_zone*/temp"))
        self.counters = sorted(
            sys.glob("devices/system/cpu/cpu*/thermal_throttle/package_throttle_count")
        )
        self._next = 0.0
        self._last = (0.0, 0.0)
        self._throttled_before = sum(map(read_number, self.counters))

    def read(self) -> tuple[float, float]:
        """Return the highest temperature in degrees Celsius, and how often heat has slowed the
        processor; 0 if unknown.

        Slowdowns are counted from the time when this object was made.
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
    """Return the number in a file; 0 if it cannot be read."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # a sensor may be off
        return 0.0
