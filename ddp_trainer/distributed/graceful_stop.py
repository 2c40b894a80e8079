"""The graceful stop: a flag that signals and a stop file set, and that the trainer reads at its control points."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from ddp_trainer.config.errors import ConfigError


class GracefulStop:
    """A flag that is set by SIGTERM, by SIGINT, or by a file that appears. The signal handler does nothing else.

    A second SIGINT within a second ends the process at once. Use as a context manager: leaving it restores the former
    signal handlers, and `is_set` keeps its value.

    Raises:
        ConfigError: the folder of the stop file cannot be read.
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        self.stop_file = stop_file
        self.is_set = False
        self._last_interrupt = float("-inf")
        self._former_handlers: dict[int, object] = {}
        try:
            with suppress(FileNotFoundError):
                os.stat(stop_file or ".")
        except OSError as error:
            raise ConfigError(
                f"DDP_TRAINER_STOP_FILE={stop_file} cannot be read ({error.strerror}): choose a file in a folder that "
                "this process can read"
            ) from error

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._last_interrupt < 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if number == signal.SIGINT:
            self._last_interrupt = now
        self.is_set = True

    def poll(self) -> bool:
        """Return whether to stop, after a look for the stop file."""
        if not self.is_set and self.stop_file is not None:
            self.is_set = os.path.exists(self.stop_file)  # false if the file system does not answer
        return self.is_set
