"""The graceful stop: a signal or a stop file sets a flag that training reads at control points."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ddp_trainer.config.errors import ConfigError


class GracefulStop:
    """A flag that is set by SIGTERM, SIGINT or the stop file.

    Use as a context manager: leaving the context restores the former signal handlers, and `is_set`
    keeps its value. A second SIGINT within a second ends the process at once.

    A closed terminal sends SIGHUP. This process ignores SIGHUP if torchrun has not started this
    process, or if nohup or a launch script has already set SIGHUP to be ignored. Otherwise SIGHUP
    sets the flag, because torchrun gets the signal too and ends its ranks.

    Raises ConfigError if the folder of the stop file cannot be read.
    """

    def __init__(self, stop_file: Path | None = None, *, under_torchrun: bool = False) -> None:
        self.stop_file = stop_file
        self.under_torchrun = under_torchrun
        self.is_set = False
        self._last_interrupt = float("-inf")
        try:
            with suppress(FileNotFoundError):
                os.stat(stop_file or ".")
        except OSError as error:
            raise ConfigError(
                f"DDP_TRAINER_STOP_FILE={stop_file} cannot be read ({error.strerror}): choose a"
                " file in a folder that this process can read"
            ) from error

    def __enter__(self) -> Self:
        handlers: dict[int, Any] = {signal.SIGTERM: self._handle, signal.SIGINT: self._handle}
        # nohup and the launch scripts ignore SIGHUP, and this must stay so
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._handle if self.under_torchrun else signal.SIG_IGN
        self._former = [
            (number, signal.signal(number, handler)) for number, handler in handlers.items()
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former:
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            last = self._last_interrupt
            self._last_interrupt = time.monotonic()
            if self._last_interrupt - last < 1:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        self.is_set = True

    def poll(self) -> bool:
        """Return whether to stop: whether the flag is set, or the stop file exists now."""
        if not self.is_set and self.stop_file is not None:
            self.is_set = os.path.exists(self.stop_file)  # false if the file system does not answer
        return self.is_set
