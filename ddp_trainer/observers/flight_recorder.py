"""The times and memory of this rank's last minutes, kept in memory and written to a file when the
job fails.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_trainer.files import replace_text

FLIGHT_DIR = "flight"
ROW_SECONDS = 0.5
"""The shortest time that a row covers; shorter steps share a row."""
MAX_ROWS = 600
"""The largest number of rows; they cover at least five minutes, in about 100 kB."""

Row = dict[str, Any]


class FlightRecorder:
    """Keeps the newest rows, and writes them when the job fails. A row has mean times by phase,
    memory and heat.
    """

    def __init__(self, run_dir: Path, phases: Sequence[str], *, rank: int) -> None:
        self.path = run_dir / FLIGHT_DIR / f"rank-{rank:05}.jsonl"
        self.phases = phases
        self.rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._step = 0
        self._steps = 0
        self._values = dict[str, float]()
        self._seconds = [0.0] * len(phases)

    def add(self, step: int, steps: Sequence[Sequence[float]], **values: float) -> None:
        """Add rows for the new steps up to `step`: seconds of each step by phase. values: further
        columns (memory).
        """
        self._values = values
        for number, seconds in enumerate(steps, start=step - len(steps) + 1):
            self._seconds = [a + b for a, b in zip(self._seconds, seconds, strict=True)]
            self._step = number
            self._steps = self._steps + 1
            if sum(self._seconds) >= ROW_SECONDS:
                self.rows.append(self._row())
                self._seconds = [0.0] * len(self.phases)
                self._steps = 0

    def _row(self) -> Row:
        times = [round(1e3 * value / self._steps, 3) for value in self._seconds]
        row = {"step": self._step, "steps": self._steps, "time": round(time.time(), 3)}
        return row | dict(zip(self.phases, times, strict=True)) | self._values

    def write(self) -> None:
        """Write all rows to the file of this rank. Any thread may call this. On a full disk,
        nothing is written.
        """
        rows = [*tuple(self.rows), *([self._row()] if self._steps else [])]
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            replace_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))
