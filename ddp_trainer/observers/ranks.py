"""The own time of each rank: to the loggers, in messages about a straggler, and in flight data."""

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.observers.flight_recorder import FlightRecorder
from ddp_trainer.observers.hardware import Sensors, current_memory_mb
from ddp_trainer.observers.step_times import StepTimer
from ddp_trainer.observers.stragglers import Straggler, StragglerFinder
from ddp_trainer.training.phase import OWN_WORK
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)

PHASES = tuple(phase.text for phase in OWN_WORK)
MIN_BLOCK_STEPS = 10
"""Own times are compared over blocks of so many steps, or of half a log window if it is longer."""


class RankTimes(Observer):
    """Compares the times in which ranks do not wait for each other, and keeps them for a failure.

    A rank sends the sum of its `StepTimer.own_times` for each block of steps.
    """

    def __init__(self, timer: StepTimer, sensors: Sensors, recorder: FlightRecorder) -> None:
        self.timer = timer
        self.sensors = sensors
        self.recorder = recorder
        self.hosts: list[str] = []
        self.finder: StragglerFinder | None = None
        """On rank 0, if there are several ranks."""
        self.block_steps = MIN_BLOCK_STEPS
        self.block = [0.0] * 2 * len(PHASES)
        self.block_count = 0
        self.is_warm = False
        """Whether a block is over: the first steps of a launch allocate memory and fill caches."""
        self.total_ms: Tensor | float = 0.0
        """Each rank's own milliseconds in this launch, float64 [W]."""
        self.num_steps = 0

    def on_start(self, run: TrainingRun) -> None:
        world = run.world
        self.hosts = world.all_gather_object(socket.gethostname())
        self.block_steps = max(MIN_BLOCK_STEPS, run.config.log_every_steps // 2)
        if world.is_main and world.world_size > 1:
            batch = range(run.config.global_batch_size)
            shares = [len(batch[rank :: world.world_size]) for rank in range(world.world_size)]
            self.finder = StragglerFinder(PHASES, shares)

    def rank_values(self, run: TrainingRun) -> Sequence[float]:
        blocks: list[float] = []
        steps = self.timer.own_times()
        for seconds in steps:
            self.block = [a + b for a, b in zip(self.block, seconds, strict=True)]
            self.block_count += 1
            if self.block_count == self.block_steps:
                blocks += self.block
                self.block = [0.0] * 2 * len(PHASES)
                self.block_count = 0
        self.recorder.add(
            run.step,
            [seconds[: len(PHASES)] for seconds in steps],
            memory_mb=round(current_memory_mb(run.world.device), 1),
            celsius=self.sensors.read().celsius,
        )
        return blocks

    def on_log(self, run: TrainingRun) -> None:
        numbers = run.gathered(self)
        blocks = numbers.view(run.world.world_size, -1, 2 * len(PHASES))
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
        self.find_straggler(self.finder, blocks, begin=run.step - self.block_count - num_steps)
        found = self.finder.found
        if found is not None:
            run.log({"straggler/rank": found.rank, "straggler/phase": found.phase})
            run.log({"straggler/slowdown": found.slowdown})

    def find_straggler(self, finder: StragglerFinder, blocks: Tensor, *, begin: int) -> None:
        """Add blocks of steps to `finder`, and log a message if its result changes.

        blocks: [W, blocks, 2 P], the sums of own times; the first block follows step `begin`.
        """
        before = finder.found
        for number, block in enumerate(blocks.unbind(1)):
            if self.is_warm:
                finder.add(block, begin=begin + number * self.block_steps)
            self.is_warm = True
        self.report_change(before, finder.found)

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
        self.recorder.write()

    def summary_values(self, run: TrainingRun) -> Mapping[str, Any]:
        if not self.num_steps:
            return {}
        means = torch.as_tensor(self.total_ms) / self.num_steps
        return {"rank_own_ms": [round(value, 3) for value in means.tolist()]}
