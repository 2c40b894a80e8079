"""How long the main thread of a rank has made no progress."""

import threading
import time

BUSY_SHARE = 0.1
"""A thread that uses more of a core than this computes, on a machine that may have more ranks than cores."""


class ProgressClock:
    """Measures how long the main thread has stood still, and how long of that without computing.

    The main thread adds 1 to `count` with everything that it does; another thread calls `update`. can_be_busy: whether
    CPU time is a sign of computing; a thread that waits for a GPU uses it too.
    """

    def __init__(self, *, can_be_busy: bool) -> None:
        self.count, self.can_be_busy = 0, can_be_busy
        self.idle_seconds = self.still_seconds = 0.0
        self._clock = time.pthread_getcpuclockid(threading.main_thread().ident or threading.get_ident())
        self._last_count, self._last_cpu = 0, self._cpu_seconds()

    def update(self, elapsed: float) -> None:
        """Note whether there was progress in the last `elapsed` seconds."""
        count, cpu = self.count, self._cpu_seconds()
        if count != self._last_count:
            self.idle_seconds = self.still_seconds = 0.0
        else:
            self.still_seconds += elapsed
            if not self.can_be_busy or cpu - self._last_cpu < BUSY_SHARE * elapsed:
                self.idle_seconds += elapsed
        self._last_count, self._last_cpu = count, cpu

    def _cpu_seconds(self) -> float:
        return time.clock_gettime(self._clock)
