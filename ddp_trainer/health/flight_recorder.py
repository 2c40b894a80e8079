"""The last minutes of this rank, kept in memory, and written to the run directory when the job fails."""

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_trainer.distributed.files import replace_text

FLIGHT_DIR = "flight"
ROW_SECONDS = 0.5
"""Steps that are shorter share a row."""
MAX_ROWS = 600
"""Five minutes at least, in some 100 kB."""

Row = dict[str, Any]


class FlightRecorder:
    """The ring buffer. phases: the names of the times of a step."""

    def __init__(self, run_dir: Path, phases: Sequence[str], *, rank: int) -> None:
        self.path, self.phases = run_dir / FLIGHT_DIR / f"rank-{rank:05}.jsonl", phases
        self.rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._seconds, self._steps = [0.0] * len(phases), 0

    def add(self, step: int, steps: Sequence[Sequence[float]], **values: float) -> None:
        """Add the seconds of each phase in the last steps up to optimizer step `step`, and what was measured there."""
        first = step - len(steps) + 1
        for number, seconds in enumerate(steps, start=first):
            self._seconds = [a + b for a, b in zip(self._seconds, seconds, strict=True)]
            self._steps += 1
            if sum(self._seconds) >= ROW_SECONDS or number == step:
                times = [round(1e3 * value / self._steps, 3) for value in self._seconds]
                row = {"step": number, "steps": self._steps, "time": round(time.time(), 3)}
                self.rows.append(row | dict(zip(self.phases, times, strict=True)) | values)
                self._seconds, self._steps = [0.0] * len(self.phases), 0

    def write(self) -> None:
        """Write what is known to the run directory, from any thread; a full disk loses it."""
        with suppress(OSError):
            self.path.parent.mkdir(exist_ok=True)
            replace_text(self.path, "".join(json.dumps(row) + "\n" for row in tuple(self.rows)))
