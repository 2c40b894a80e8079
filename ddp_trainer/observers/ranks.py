"""The peak memory and the own time of each rank, and the straggler.

A rank's own time is the time in which it does not wait for other ranks. The straggler is the rank
with a longer own time than the other ranks, which wait for it.
"""

import json
import logging
import resource
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.files import own_folder, replace_text
from ddp_trainer.observers.step_times import StepTimer
from ddp_trainer.training.phase import OWN_WORK
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)

PHASES = tuple(phase.text for phase in OWN_WORK)
WARM_STEPS = 10
"""The number of first steps of a launch that are ignored: they allocate memory, fill caches."""
MAX_ROWS = 1000
"""The number of newest log points that the flight data of a rank covers, in about 150 kB."""

NAMED = 0.08
CLEARED = 0.04
"""A rank is reported if its step, or one phase of its step, takes longer by at least `NAMED`. The
report ends when its whole step takes longer by less than `CLEARED`.

Both numbers are shares of the time of a step. The rank is compared with the median of the other
ranks.
"""
SAMPLE_SECONDS = 0.5
"""A sample has the own times of consecutive steps, whose sum is at least so long (the median over
ranks). In a shorter sample, the kernel's scheduling of processes would make ranks differ.
"""
WINDOWS = {3: 3, 11: 7, 45: 24}
"""The mean over a window of 3, 11 or 45 consecutive samples decides: a short window finds a
straggler early, a long window averages out noise.

In at least 3, 7 or 24 of these samples, the rank must be slower by more than `EACH`, so that one
long pause is not enough.
"""
EACH = 0.05
"""The slowdown that single samples (see `WINDOWS`), and the rank's whole step, must exceed, as a
share of the time of a step.
"""
MIN_PAST = 7
MAX_PAST = 20
"""The noise is measured in earlier windows of the same length. They begin within a span of
`MIN_PAST` to about `MAX_PAST` times this length; after a shorter past, no rank is reported.
"""
NOISE_FACTOR = 5.0
"""A slowdown must be at least this many times the noise: the 90th percentile of the slowdowns in
earlier windows, minus their median.
"""
PHASE_MARGIN = 2.0
"""At first the longest phase is reported, and then the reported phase stays, unless the rank loses
more than this many times as much time in another phase.
"""

GROWTH_EPOCHS = 10
"""A warning names a rank whose memory has grown in each of so many consecutive epochs."""
GROWTH_MB = 64.0
GROWTH_SHARE = 0.1
"""The total growth must be at least so many MiB, and at least this share of the memory before."""


class Ranks(Observer):
    """Compares peak memory and own times of all ranks; writes those of this rank after a failure.

    At each log point, a rank sends its peak memory in MiB, then the sums of `StepTimer.own_times`
    over the first and over the second half of the steps in the log window.
    """

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.hosts: list[str] = []
        self.memory_mb = torch.zeros(0)
        """Each rank's peak memory up to the last log point, in MiB: float64 [W]; before, [0]."""
        self.epochs: deque[Tensor] = deque(maxlen=GROWTH_EPOCHS + 1)
        """The values of `memory_mb` at the ends of the last epochs."""
        self.stragglers: StragglerFinder | None = None
        """Set on rank 0 by `on_start`, if there are several ranks; else None."""
        self.total_ms = torch.zeros(())
        """Each rank's own time in the `num_steps` steps of this launch, in ms: float64 [W]."""
        self.num_steps = 0
        self.rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)
        """The flight data: for each log point the mean own times by phase, and peak memory."""

    def on_start(self, run: TrainingRun) -> None:
        world = run.world
        self.hosts = world.all_gather_object(socket.gethostname())
        shares = world.all_gather_object(run.loaders.sampler.local_batch_size)
        if world.is_main and world.world_size > 1:
            self.stragglers = StragglerFinder(PHASES, shares)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)

    def rank_values(self, run: TrainingRun) -> Sequence[float]:
        steps = torch.tensor(self.timer.own_times(), dtype=torch.float64)
        means = steps.mean(0).mul(1e3).tolist()
        memory_mb = peak_memory_mb(run.world.device)
        self.rows.append(
            {
                "step": run.step,
                "steps": len(steps),
                "time": round(time.time(), 3),
                **{name: round(mean, 3) for name, mean in zip(PHASES, means, strict=False)},
                "memory_mb": round(memory_mb, 1),
            }
        )
        halves = torch.cat([half.sum(0) for half in steps.tensor_split(2)])
        return [memory_mb, *halves.tolist()]

    def on_log(self, run: TrainingRun) -> None:
        run.log({"memory/peak_mb": peak_memory_mb(run.world.device)})
        by_rank = run.gathered(self)
        if by_rank.numel():
            self.memory_mb = by_rank[:, 0]
            rank = int(self.memory_mb.argmax())
            run.log({"memory/max_rank": rank, "memory/max_peak_mb": float(self.memory_mb[rank])})
            if not self.timer.steps:  # see `StepTimes.on_log`
                return
            self.log_times(run, by_rank[:, 1:].view(len(by_rank), 2, -1))

    def on_evaluation(self, run: TrainingRun) -> None:
        if self.memory_mb.numel():  # not after the loss of a rank, before the first log point
            self.epochs.append(self.memory_mb)
        if len(self.epochs) <= GROWTH_EPOCHS or not run.world.is_main:
            return
        rank = growing_rank(torch.stack(tuple(self.epochs)))
        if rank is not None:
            logger.warning(
                "the memory of rank %d on %s has grown in each of the last %d epochs, from %s to "
                "%s MiB: if you train with code of your own, it may keep objects that are no longer"
                " needed, for example losses as tensors (keep loss.item() instead)",
                rank,
                self.hosts[rank],
                GROWTH_EPOCHS,
                f"{self.epochs[0][rank]:,.0f}",
                f"{self.epochs[-1][rank]:,.0f}",
            )
            self.epochs.clear()

    def log_times(self, run: TrainingRun, halves: Tensor) -> None:
        """Log own times, and a warning if the straggler has changed.

        halves: float64 [W, 2, 2 P]: for each of W ranks and each half of the log window, the sums
        in seconds that `StragglerFinder.add` takes.
        """
        own_ms = 1e3 * halves.sum(1)[:, : len(PHASES)].sum(1)
        self.total_ms = self.total_ms + own_ms
        num_steps = self.rows[-1]["steps"]
        self.num_steps += num_steps
        if self.stragglers is None:
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
        before = self.stragglers.found
        if self.num_steps - num_steps >= WARM_STEPS:
            self.stragglers.add(halves[:, 0], begin=run.step - num_steps)
            self.stragglers.add(halves[:, 1], begin=run.step - num_steps // 2)
        straggler = self.stragglers.found
        self.report_change(before, straggler)
        if straggler is not None:
            run.log(
                {
                    "straggler/rank": straggler.rank,
                    "straggler/phase": straggler.phase,
                    "straggler/slowdown": straggler.slowdown,
                }
            )

    def report_change(self, before: "Straggler | None", straggler: "Straggler | None") -> None:
        """Log a warning if there is a new straggler, another phase, or no straggler any more.

        before, straggler: the straggler before and now; None: no rank is slow.
        """
        if straggler is None and before is not None:
            host = self.hosts[before.rank]
            logger.warning("rank %d on %s is no longer slower than the others", before.rank, host)
        if straggler is not None and straggler != before:
            logger.warning(
                "rank %d on %s is %.0f %% slower than the median of the other ranks, in phase %s "
                "(since step %s)",
                straggler.rank,
                self.hosts[straggler.rank],
                100 * straggler.slowdown,
                straggler.phase,
                f"{straggler.since:,}",
            )

    def on_failure(self, run: TrainingRun) -> None:
        # on a full disk, nothing is written
        with suppress(OSError), own_folder(run.run_dir / "flight") as folder:
            # a copy, because the main thread may add a row at the same time
            text = "".join(json.dumps(row) + "\n" for row in self.rows.copy())
            replace_text(folder / f"rank-{run.world.rank:05}.jsonl", text)

    def summary_values(self, run: TrainingRun) -> Mapping[str, Any]:
        if not self.num_steps:
            return {}
        means = self.total_ms / self.num_steps
        return {"rank_own_ms": [round(value, 3) for value in means.tolist()]}


# --- the straggler --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that slows down all ranks."""

    rank: int
    phase: str
    """The phase in which the rank loses time, chosen as `PHASE_MARGIN` describes."""
    slowdown: float = field(compare=False)
    """The rank's own time per step, divided by the median of the other ranks, minus 1."""
    since: int = field(compare=False)
    """The optimizer step after which the rank became slow."""


class StragglerFinder:
    """Finds the straggler by the own times of all ranks, in windows of several samples.

    phases: the names of the P phases. shares: how many images each of the W ranks has in a step.

    A rank counts as slow only if its time per step and its time per image are both longer, so that
    a larger share of the batch is no fault. A phase or the whole step must be longer by the share
    `NAMED` of a step, and the whole step by `EACH`; by more on a machine where the times of ranks
    vary (`NOISE_FACTOR`). The part of a phase in which a rank's thread runs on no core is also
    compared separately, because it varies less.
    """

    def __init__(self, phases: Sequence[str], shares: Sequence[int]) -> None:
        self.phases = phases
        self.shares = torch.tensor(shares, dtype=torch.float64)
        self.found: Straggler | None = None
        self._window_length = 0
        """The number of samples in the window that determined `found`."""
        self._samples: deque[tuple[int, Tensor]] = deque(maxlen=max(WINDOWS))
        """The newest samples: the step after which a sample begins, and its `compare` result."""
        self._quiet: deque[Tensor] = deque(maxlen=(MAX_PAST + 2) * max(WINDOWS))
        """The `compare` results of the newest samples with no slow rank, which show the noise."""
        self._total = torch.zeros(len(phases), dtype=torch.float64)
        self._begin: int | None = None
        self._seconds = torch.zeros(len(shares), 2 * len(phases), dtype=torch.float64)

    def add(self, seconds: Tensor, *, begin: int) -> None:
        """Add the summed times of the steps after optimizer step `begin`, and update `found`.

        seconds: float64 [W, 2 P]: for each of W ranks the own time in each of the P phases, then
        the part of each phase in which the rank's thread did not run on a core.
        """
        self._begin = begin if self._begin is None else self._begin
        self._seconds = self._seconds + seconds
        own = self._seconds[:, : len(self.phases)]
        if own.sum(1).median() >= SAMPLE_SECONDS:
            self._total += own.sum(0)
            self._samples.append((self._begin, compare(self._seconds, self.shares)))
            self._begin = None
            self._seconds = torch.zeros_like(self._seconds)
            self._find()

    def _find(self) -> None:
        """Set, update or clear `found`, the straggler, from the newest samples."""
        slow = [
            (length, rank)
            for length in WINDOWS
            if len(self._samples) >= length and (rank := self._slow_rank(length)) is not None
        ]
        if self.found is not None:
            slow.append((self._window_length, self.found.rank))
        if not slow:
            self._quiet.append(self._samples[-1][1])
            return
        length, rank = slow[0]
        if self.found is None:
            for _ in range(min(length - 1, len(self._quiet))):
                self._quiet.pop()  # the rank was already slow in these samples of the window
        self._name(rank, length)
        if self.found is not None and self.found.slowdown < CLEARED:
            self.found = None
            self._samples.clear()

    def _window(self, length: int) -> Tensor:
        """Return the `compare` results of the newest `length` samples: [length, W, 2 P + 1]."""
        return torch.stack([slowdown for _, slowdown in self._samples][-length:])

    def _slow_rank(self, length: int) -> int | None:
        """Return the slowest rank whose slowdown is at least `NAMED` and above the noise, or None.

        length: the number of samples in the window that decides.
        """
        window = self._window(length)
        excess = level(window)
        is_slow = (
            (excess >= NAMED)
            & ((window > EACH).sum(0) >= WINDOWS[length])
            & (excess[:, -1:] > EACH)
        )
        # without the samples of this window, of which the newest is not in `_quiet`
        past = list(self._quiet)[-(MAX_PAST + 2) * length : 1 - length]
        if not is_slow.any() or len(past) < (MIN_PAST + 1) * length:
            return None
        before = level(torch.stack(past).unfold(0, length, 1).movedim(-1, 0))
        usual = before.quantile(0.5, 0)
        is_slow &= excess >= usual.clamp(max=0) + NOISE_FACTOR * (before.quantile(0.9, 0) - usual)
        slowest = torch.where(is_slow.any(1), excess[:, -1], -1.0).argmax()
        return int(slowest) if is_slow.any() else None

    def _name(self, rank: int, length: int) -> None:
        """Set `found` to `rank` and its slow phase, by the newest `length` samples."""
        since = self._samples[-length][0]
        phase = int(self._total.argmax())
        if self.found is not None and self.found.rank == rank:
            since = self.found.since
            phase = self.phases.index(self.found.phase)
        slowdown = level(self._window(length))[rank]
        of_phases = slowdown[:-1].view(2, -1).amax(0)
        of_phases[phase] *= PHASE_MARGIN
        phase = int(of_phases.argmax())
        self.found = Straggler(rank, self.phases[phase], float(slowdown[-1]), since)
        self._window_length = length


def level(window: Tensor) -> Tensor:
    """Return the mean of `window`, [samples, …], over samples.

    For 3 samples, return the smaller of mean and median: the median ignores one long pause.
    """
    mean = window.mean(0)
    return torch.minimum(mean, window.median(0).values) if len(window) == min(WINDOWS) else mean


def compare(seconds: Tensor, shares: Tensor) -> Tensor:
    """Return how much longer each time of each rank is than the median of the other ranks.

    seconds: [W, 2 P]: for each rank the times of the P phases, then the parts of these times in
    which the rank's thread did not run on a core; sums over some steps. shares: [W], images per
    rank in a step. The result, [W, 2 P + 1], has the columns of `seconds`, then the whole step. Its
    values are shares of the time of a step of the other ranks.
    """
    total = seconds[:, : seconds.shape[1] // 2].sum(1, keepdim=True)
    times = torch.cat([seconds, total], 1)
    per_step = times - median_of_others(times)
    per_image = times - shares[:, None] * median_of_others(times / shares[:, None])
    excess = torch.minimum(per_step, per_image)
    others = (times - excess)[:, -1:]  # the time of a step of the others
    return excess / others.clamp(min=1e-9)


def median_of_others(values: Tensor) -> Tensor:
    """Return for each row of `values`, [W, N], the median of the other rows: [W, N], W ≥ 2."""
    ordered, ranks = values.sort(0)
    place = ranks.argsort(0)  # the position of each value in its sorted column
    last = len(values) - 2
    middle = torch.zeros_like(values)
    for position in (last // 2, (last + 1) // 2):
        # positions from the value's own position on move up by one, because it is left out
        middle += ordered.gather(0, position + (place <= position).long()) / 2
    return middle


# --- memory ---------------------------------------------------------------------------------------


def growing_rank(memory_mb: Tensor) -> int | None:
    """Return the rank with the largest memory growth; None if no rank's growth needs a warning.

    The memory must have grown in each epoch, and in total by `GROWTH_MB` and `GROWTH_SHARE`.
    memory_mb: float64 [epochs, W], the peak memory of the W ranks, in MiB.
    """
    growth = memory_mb.diff(dim=0)
    total = growth.sum(0)
    enough = (GROWTH_SHARE * memory_mb[0]).clamp(min=GROWTH_MB)
    grown = torch.where((growth > 0).all(0) & (total >= enough), total, 0.0)
    return int(grown.argmax()) if grown.any() else None


def peak_memory_mb(device: torch.device) -> float:
    """Return this rank's peak in MiB: on a GPU the memory that torch allocated, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
