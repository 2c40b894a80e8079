"""The soft stop: a flag that signals and a stop file set, and that the trainer reads when all ranks agree."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self


class SoftStop:
    """Set by SIGTERM or SIGINT, or by a file that appears. Nothing but the flag is touched in the handler.

    A second SIGINT within a second stops at once, as Ctrl-C does elsewhere. Use as a context manager: leaving it
    puts the former handlers back.
    """

    def __init__(self, stop_file: Path | None = None) -> None:
        self.stop_file = stop_file
        self.is_set = False
        self._interrupted = float("-inf")
        self._former: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._interrupted < 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if number == signal.SIGINT:
            self._interrupted = now
        self.is_set = True

    def poll(self) -> bool:
        """Say whether to stop, looking for the stop file too."""
        if not self.is_set and self.stop_file is not None and self.stop_file.exists():
            self.is_set = True
        return self.is_set
