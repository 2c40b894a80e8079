"""The own time of each rank: to the loggers, in messages about a straggler, and in flight data."""

import json
import logging
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.files import replace_text
from ddp_trainer.observers.memory import current_memory_mb
from ddp_trainer.observers.step_times import StepTimer
from ddp_trainer.observers.stragglers import Straggler, StragglerFinder
from ddp_trainer.training.phase import OWN_WORK
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)

PHASES = tuple(phase.text for phase in OWN_WORK)
MIN_BLOCK_STEPS = 10
"""Own times are compared over blocks of so many steps, or of half a log window if it is longer."""
MAX_ROWS = 1000
"""How many log points the flight data covers, in about 150 kB."""


class RankTimes(Observer):
    """Compares the times in which ranks do not wait for each other, and keeps them for a failure.

    A rank sends the sum of its `StepTimer.own_times` for each block of steps.
    """

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.hosts: list[str] = []
        self.finder: StragglerFinder | None = None
        """On rank 0, if there are several ranks."""
        self.block_steps = MIN_BLOCK_STEPS
        self.steps: list[list[float]] = []
        """The own times of the steps of the next block."""
        self.is_warm = False
        """Whether a block is over: the first steps of a launch allocate memory and fill caches."""
        self.total_ms: Tensor | float = 0.0
        """Each rank's own milliseconds in this launch, float64 [W]."""
        self.num_steps = 0
        self.rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)
        """The flight data: for each log point the mean own times by phase, and memory."""

    def on_start(self, run: TrainingRun) -> None:
        world = run.world
        self.hosts = world.all_gather_object(socket.gethostname())
        self.block_steps = max(MIN_BLOCK_STEPS, run.config.log_every_steps // 2)
        if world.is_main and world.world_size > 1:
            batch = range(run.config.global_batch_size)
            shares = [len(batch[rank :: world.world_size]) for rank in range(world.world_size)]
            self.finder = StragglerFinder(PHASES, shares)

    def rank_values(self, run: TrainingRun) -> Sequence[float]:
        steps = self.timer.own_times()
        if steps:
            self.rows.append(self.row(run, steps))
        self.steps += steps
        count = len(self.steps) // self.block_steps * self.block_steps
        whole = torch.tensor(self.steps[:count], dtype=torch.float64)
        del self.steps[:count]
        return whole.view(-1, self.block_steps, 2 * len(PHASES)).sum(1).view(-1).tolist()

    def row(self, run: TrainingRun, steps: list[list[float]]) -> dict[str, Any]:
        """Return a row of the flight data for `steps`, the own times since the last log point."""
        means = torch.tensor(steps).mean(0).mul(1e3).tolist()
        return {
            "step": run.step,
            "steps": len(steps),
            "time": round(time.time(), 3),
            **{name: round(mean, 3) for name, mean in zip(PHASES, means, strict=False)},
            "memory_mb": round(current_memory_mb(run.world.device), 1),
        }

    def on_log(self, run: TrainingRun) -> None:
        blocks = run.gathered(self).view(run.world.world_size, -1, 2 * len(PHASES))
        num_steps = blocks.shape[1] * self.block_steps
        if not num_steps:
            return
        own_ms = 1e3 * blocks.sum(1)[:, : len(PHASES)].sum(1)
        self.total_ms = self.total_ms + own_ms
        self.num_steps += num_steps
        if self.finder is None:
            return

        own_ms = own_ms / num_steps
        run.log(
            {
                "rank/own_ms_min": float(own_ms.min()),
                "rank/own_ms_median": float(own_ms.median()),
                "rank/own_ms_max": float(own_ms.max()),
                "rank/slowest": int(own_ms.argmax()),
            }
        )
        before = self.finder.found
        begin = run.step - len(self.steps) - num_steps
        for number, block in enumerate(blocks.unbind(1)):
            if self.is_warm:
                self.finder.add(block, begin=begin + number * self.block_steps)
            self.is_warm = True
        found = self.finder.found
        self.report_change(before, found)
        if found is not None:
            run.log({"straggler/rank": found.rank, "straggler/phase": found.phase})
            run.log({"straggler/slowdown": found.slowdown})

    def report_change(self, before: Straggler | None, found: Straggler | None) -> None:
        """Log a message if another rank is slow than before, or the rank in another phase."""
        if found is None:
            if before is not None:
                host = self.hosts[before.rank]
                logger.warning(
                    "rank %d on %s is no longer slower than the others", before.rank, host
                )
            return
        if before is None or (found.rank, found.phase) != (before.rank, before.phase):
            logger.warning(
                "rank %d on %s is %.0f %% slower than the median of the other ranks, in phase %s "
                "(since step %s)",
                found.rank,
                self.hosts[found.rank],
                100 * found.slowdown,
                found.phase,
                f"{found.since:,}",
            )

    def on_failure(self, run: TrainingRun) -> None:
        write_flight_data(run.run_dir, self.rows, rank=run.world.rank)

    def summary_values(self, run: TrainingRun) -> Mapping[str, Any]:
        if not self.num_steps:
            return {}
        means = torch.as_tensor(self.total_ms) / self.num_steps
        return {"rank_own_ms": [round(value, 3) for value in means.tolist()]}


def write_flight_data(run_dir: Path, rows: Iterable[Mapping[str, Any]], *, rank: int) -> None:
    """Write `rows` to flight/ in `run_dir`; on a full disk, nothing is written."""
    path = run_dir / "flight" / f"rank-{rank:05}.jsonl"
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        replace_text(path, "".join(json.dumps(row) + "\n" for row in tuple(rows)))
