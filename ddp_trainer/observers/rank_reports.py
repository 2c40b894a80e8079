"""Reports of the times and memory of all ranks at each logged step: to the loggers, in messages and
in ranks.jsonl.
"""

import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.distributed.process_group import World
from ddp_trainer.files import read_records, replace_text
from ddp_trainer.observers.flight_recorder import FlightRecorder
from ddp_trainer.observers.memory import (
    GROWTH_EPOCHS,
    MemoryGrowth,
    current_memory_mb,
    peak_memory_mb,
)
from ddp_trainer.observers.sensors import Sensors
from ddp_trainer.observers.stragglers import StragglerFinder

logger = logging.getLogger(__name__)

RANKS_FILE = "ranks.jsonl"
MIN_BLOCK_STEPS = 10
"""The ranks' own times are compared over blocks of so many steps, or of half a log window if it is
longer.
"""
MAX_VALUES = 100_000
"""ranks.jsonl has at most about this many times; when it has more, every two rows are merged into
one.
"""

NUM_SENSORS = 4
"""How many numbers a rank sends before its times: memory, its peak (MiB), degrees Celsius,
slowdowns by heat.
"""

Row = dict[str, Any]


class RankReports:
    """Collects this rank's numbers at each logged step, and turns those of all ranks into values to
    log and messages.

    own_times: returns, for each step since the last logged step, 2 P numbers: the seconds of each
    of the P `phases`, in which a rank does not wait for other ranks, then the part of each in which
    the rank's thread did not run on a core. shares: how many images each rank has in a step.
    Collective: every rank must construct one.
    """

    def __init__(
        self,
        own_times: Callable[[], list[list[float]]],
        phases: tuple[str, ...],
        *,
        world: World,
        shares: list[int],
        log_every_steps: int,
        run_dir: Path,
    ) -> None:
        self.own_times = own_times
        self.phases = phases
        self.world = world
        self.block_steps = max(MIN_BLOCK_STEPS, log_every_steps // 2)
        self.hosts: list[str] = world.all_gather_object(socket.gethostname())
        self.finder = (
            StragglerFinder(phases, shares) if world.is_main and world.world_size > 1 else None
        )
        self.recorder = FlightRecorder(run_dir, phases, rank=world.rank)
        self.sensors = Sensors(world.device)
        self.growth = MemoryGrowth()
        self.is_throttled = False
        self.lanes = Lanes(
            run_dir / RANKS_FILE, max_rows=max(16, MAX_VALUES // (world.world_size * len(phases)))
        )
        self.is_warm = False
        self.block = [0.0] * 2 * len(phases)
        self.count = 0
        self.step = 0
        self.total_ms = torch.zeros(world.world_size, dtype=torch.float64)
        self.num_steps = 0
        """Each rank's milliseconds in this launch, without waiting for others, float64 [W], and the
        number of steps.
        """

    def start(self, step: int) -> None:
        """Prepare for reports after optimizer step `step`; delete rows of later steps from an
        earlier launch.
        """
        self.step = step
        if self.world.is_main:
            self.lanes.start(step)

    def own(self) -> list[float]:
        """Return NUM_SENSORS numbers (memory, heat), then the sum of `own_times` in each new block
        of `block_steps`.
        """
        blocks: list[float] = []
        steps = self.own_times()
        for seconds in steps:
            self.block = [a + b for a, b in zip(self.block, seconds, strict=True)]
            self.count = self.count + 1
            if self.count == self.block_steps:
                blocks += self.block
                self.block = [0.0] * 2 * len(self.phases)
                self.count = 0
        self.step += len(steps)
        memory = current_memory_mb(self.world.device)
        celsius, throttled = self.sensors.read()
        own = [seconds[: len(self.phases)] for seconds in steps]
        self.recorder.add(self.step, own, memory_mb=round(memory, 1), celsius=celsius)
        return [memory, peak_memory_mb(self.world.device), celsius, throttled, *blocks]

    def add(self, numbers: Tensor, step: int, epoch: int) -> dict[str, float | str]:
        """Record `numbers`, [W, n]: row r is `own()` of rank r. Return the values to log after step
        `step`, by tag.
        """
        memory, peak, celsius, throttled = numbers[:, :NUM_SENSORS].unbind(1)
        blocks = numbers[:, NUM_SENSORS:].reshape(self.world.world_size, -1, 2 * len(self.phases))
        tags: dict[str, float | str] = {
            "memory/max_peak_mb": float(peak.max()),
            "memory/max_rank": int(peak.argmax()),
        }
        if celsius.any():
            tags |= {
                "temperature/max_celsius": float(celsius.max()),
                "temperature/max_rank": int(celsius.argmax()),
            }
        if self.world.is_main:
            self.warn(memory, celsius, throttled, epoch)
        if not blocks.shape[1]:
            return tags
        end = step - self.count
        begin = end - blocks.shape[1] * self.block_steps
        milliseconds = 1e3 * blocks.sum(1)[:, : len(self.phases)] / (end - begin)
        if self.world.is_main:
            times = dict(zip(self.phases, milliseconds.T.tolist(), strict=True))
            self.lanes.add(
                {"step": end, "steps": end - begin, **times, "memory_mb": memory.tolist()}
            )
        total = milliseconds.sum(1)
        self.total_ms = self.total_ms + total * (end - begin)
        self.num_steps = self.num_steps + end - begin
        if self.finder is None:
            return tags
        tags |= {"rank/own_ms_min": float(total.min()), "rank/own_ms_median": float(total.median())}
        tags |= {"rank/own_ms_max": float(total.max()), "rank/slowest": int(total.argmax())}
        return tags | self.find_straggler(blocks, begin)

    def mean_own_ms(self) -> list[float]:
        """Return each rank's mean milliseconds of a step in this launch without waiting for others;
        [] if unknown.
        """
        return (
            [round(value, 3) for value in (self.total_ms / self.num_steps).tolist()]
            if self.num_steps
            else []
        )

    def warn(self, memory: Tensor, celsius: Tensor, throttled: Tensor, epoch: int) -> None:
        """Log a warning for a rank whose memory grows in every epoch, and once for a processor that
        heat slows down.

        All are float64 [W]. memory: MiB. celsius: degrees, 0 if unknown. throttled: number of
        slowdowns by heat.
        """
        if (grown := self.growth.add(epoch, memory)) is not None:
            rank, before, now = grown
            logger.warning(
                "the memory of rank %d on %s has grown in each of the last %d epochs, from %s to %s"
                " MiB: some code keeps objects that are no longer needed, for example losses as"
                " tensors (keep loss.item() instead)",
                rank,
                self.hosts[rank],
                GROWTH_EPOCHS,
                f"{before:,.0f}",
                f"{now:,.0f}",
            )
        if throttled.any() and not self.is_throttled:
            self.is_throttled = True
            rank = int(throttled.argmax())
            # on a GPU rank it is the GPU's
            is_known = self.world.device.type == "cpu" and celsius[rank] > 0
            degrees = f" ({celsius[rank]:.0f} °C)" if is_known else ""
            logger.warning(
                "the processor of %s is slowed down by heat%s", self.hosts[rank], degrees
            )

    def find_straggler(self, blocks: Tensor, begin: int) -> dict[str, float | str]:
        """Return the values to log about the slow rank, by tag, or {}; log a message if this rank
        or its phase changes.

        blocks: [W, blocks, 2 P], the sum of `own_times` in each block of steps after optimizer step
        `begin`.
        """
        assert self.finder is not None
        was = self.finder.found
        for number, block in enumerate(blocks.unbind(1)):
            if self.is_warm:  # the first steps of a launch allocate memory and fill caches
                self.finder.add(block, begin=begin + number * self.block_steps)
            self.is_warm = True
        found = self.finder.found
        if found is None:
            if was is not None:
                logger.warning(
                    "rank %d on %s is no longer slower than the others",
                    was.rank,
                    self.hosts[was.rank],
                )
            return {}
        if was is None or (found.rank, found.phase) != (was.rank, was.phase):
            logger.warning(
                "rank %d on %s is %.0f %% slower than the median of the other ranks, in phase %s"
                " (since step %s)",
                found.rank,
                self.hosts[found.rank],
                100 * found.slowdown,
                found.phase,
                f"{found.since:,}",
            )
        return {
            "straggler/rank": found.rank,
            "straggler/phase": found.phase,
            "straggler/slowdown": found.slowdown,
        }


class Lanes:
    """Writes ranks.jsonl: rows with each rank's mean times and memory. At `max_rows` rows, every
    two are merged.
    """

    def __init__(self, path: Path, *, max_rows: int) -> None:
        self.path = path
        self.max_rows = max_rows
        self.rows: list[Row] = []
        self.is_failing = False

    def start(self, step: int) -> None:
        """Read the rows of ranks.jsonl up to optimizer step `step`, and delete later rows from this
        file.
        """
        with suppress(OSError):
            rows = (row for _, row in read_records(self.path) if isinstance(row.get("steps"), int))
            self.rows = [row for row in rows if row["step"] <= step]
            self.write("w", self.rows)

    def add(self, row: Row) -> None:
        """Append a row; when there are too many, merge every two rows into one; an odd last row
        stays as it is.
        """
        self.rows.append({"time": time.time(), **row})
        if len(self.rows) < self.max_rows:
            return self.write("a", self.rows[-1:])
        pairs = zip(self.rows[::2], self.rows[1::2], strict=False)
        self.rows = [merge(*pair) for pair in pairs] + self.rows[len(self.rows) // 2 * 2 :]
        self.write("w", self.rows)

    def write(self, mode: str, rows: list[Row]) -> None:
        """Replace the file by `rows` (`mode` w) or append them (a). Of consecutive failures, log
        only the first.
        """
        text = "".join(json.dumps(rounded(row)) + "\n" for row in rows)
        try:
            if mode == "w":
                return replace_text(self.path, text)
            with open(self.path, "a") as file:
                file.write(text)
            self.is_failing = False
        except OSError as error:
            if not self.is_failing:
                logger.warning("%s was not written: %s", self.path, error)
            self.is_failing = True


def merge(first: Row, second: Row) -> Row:
    """Return one row in place of two: the means, or the values of `second` if the number of ranks
    has changed.
    """
    steps = first["steps"] + second["steps"]
    merged = dict(second) | {"steps": steps}
    for name, values in second.items():
        before = first.get(name)
        if isinstance(values, list) and isinstance(before, list) and len(before) == len(values):
            pairs = zip(before, values, strict=True)
            merged[name] = [(a * first["steps"] + b * second["steps"]) / steps for a, b in pairs]
    return merged


def rounded(row: Row) -> Row:
    """Return `row` with times rounded to a microsecond, which makes the file smaller."""
    return {
        name: [round(v, 3) for v in value] if isinstance(value, list) else value
        for name, value in row.items()
    }
