"""Finds the straggler: the rank whose own work takes longer than the work of the other ranks, which
wait for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAMED = 0.08
CLEARED = 0.04
"""A rank is reported if its steps, or a phase of them, take longer by `NAMED`, until its steps are
below `CLEARED`.

Both numbers are shares of the time of a step. The rank is compared with the median of the other
ranks.
"""
SAMPLE_SECONDS = 0.5
"""The shortest length of a sample: in a shorter one, the kernel's scheduling of processes would
decide.
"""
WINDOWS = {3: 3, 11: 7, 45: 24}
"""The mean of 3, 11 or 45 samples in a row decides: a short window is quick, a long window averages
noise out.

At least 3, 7 or 24 of these samples must be above `EACH`, so that one long pause is not enough.
"""
EACH = 0.05
"""The smallest slowdown of single samples, and of the rank's whole step, as a share of the time of
a step.
"""
MIN_PAST = 7
MAX_PAST = 20
"""The noise is measured before a window, over at least `MIN_PAST` and at most `MAX_PAST` times its
length.
"""
NOISE_FACTOR = 5.0
"""A slowdown must be this many times the noise: the 90th percentile of earlier windows minus their
median.
"""
PHASE_MARGIN = 2.0
"""The longest or already reported phase is reported, unless the rank loses this many times more in
another phase.
"""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that slows down all ranks."""

    rank: int
    phase: str
    """The longest phase, or the phase in which the rank loses far more time (`PHASE_MARGIN`)."""
    slowdown: float
    """The rank's own time per step, divided by the median of the other ranks, minus 1."""
    since: int
    """The optimizer step after which the rank became slow."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of some steps, compared over ranks."""

    begin: int
    slowdown: Tensor
    """float64 [W, 2 P + 1]: how much longer each time of a rank is than on the other ranks, as a
    share of a step.

    The times of a rank are: each of the P phases, the part of each in which its thread did not run,
    the whole step.
    """
    longest: int
    """The number of the phase in which the ranks spend most time."""


class StragglerFinder:
    """Compares the ranks' own times, in which they do not wait for others, over windows of samples
    (sums over steps).

    phases: the names of the P phases. shares: how many images each of the W ranks has in a step. A
    rank counts as slow only if both its time per step and its time per image are longer, so that a
    larger share of the batch is no fault. One of them must be longer by the share `NAMED` of a
    step, and the whole step by `EACH`; by more on a machine where the times of ranks vary. The time
    in which a rank's thread does not run on a core is compared separately, because it varies less.
    """

    def __init__(self, phases: Sequence[str], shares: Sequence[int]) -> None:
        self.phases = phases
        self.shares = torch.tensor(shares, dtype=torch.float64)
        self.found: Straggler | None = None
        self._samples: deque[Sample] = deque(maxlen=max(WINDOWS))
        self._past: dict[int, deque[Tensor]] = {
            length: deque(maxlen=(MAX_PAST + 1) * length) for length in WINDOWS
        }
        self._length = min(WINDOWS)
        self._begin: int | None = None
        self._seconds = torch.zeros(len(shares), 2 * len(phases), dtype=torch.float64)

    def add(self, seconds: Tensor, *, begin: int) -> None:
        """Add the summed times of some steps, the first of which follows optimizer step `begin`,
        and update `found`.

        seconds: float64 [W, 2 P]: for each of W ranks the P phases (without waiting for other
        ranks), then the part of each phase in which the rank's thread did not run on a core.
        """
        self._begin = begin if self._begin is None else self._begin
        self._seconds = self._seconds + seconds
        if self._seconds[:, : len(self.phases)].sum(1).median() >= SAMPLE_SECONDS:
            self._samples.append(compare(self._seconds, self.shares, begin=self._begin))
            self._begin = None
            self._seconds = torch.zeros_like(self._seconds)
            self._find()

    def _find(self) -> None:
        """Set, update or clear `found`, the straggler, from the newest samples."""
        slowdowns = torch.stack([sample.slowdown for sample in self._samples])
        windows = {length: slowdowns[-length:] for length in WINDOWS if len(slowdowns) >= length}
        slow = [
            (length, rank)
            for length, window in windows.items()
            if (rank := self._slow_rank(window)) is not None
        ]
        if self.found is not None:
            slow.append((self._length, self.found.rank))
        if slow:
            length, rank = slow[0]
            slowdown = level(windows[length])[rank]
            self._name(rank, slowdown, first=self._samples[-length], length=length)
        else:
            for length, window in windows.items():
                self._past[length].append(level(window))
        if self.found is not None and self.found.slowdown < CLEARED:
            self.found = None
            self._samples.clear()

    def _slow_rank(self, window: Tensor) -> int | None:
        """Return the slowest rank whose slowdown is at least `NAMED` and exceeds the noise; None if
        there is none.

        window: slowdowns, [samples, W, 2 P + 1], with the columns of `Sample`.
        """
        length = len(window)
        excess = level(window)
        is_slow = (
            (excess >= NAMED)
            & ((window > EACH).sum(0) >= WINDOWS[length])
            & (excess[:, -1:] > EACH)
        )
        past = list(self._past[length])
        # without windows that overlap with this one
        past = past[:-length] if self.found is None else past
        if not is_slow.any() or len(past) < MIN_PAST * length:
            return None
        before = torch.stack(past)
        usual = before.quantile(0.5, 0)
        is_slow &= excess >= usual.clamp(max=0) + NOISE_FACTOR * (before.quantile(0.9, 0) - usual)
        slowest = torch.where(is_slow.any(1), excess[:, -1], -1.0).argmax()
        return int(slowest) if is_slow.any() else None

    def _name(self, rank: int, slowdown: Tensor, *, first: Sample, length: int) -> None:
        """Set `found` to `rank` and its slow phase. slowdown: mean of `length` samples from `first`
        on, [2 P + 1].
        """
        since = first.begin
        named = first.longest
        if self.found is None:
            for past_length, past in self._past.items():
                for _ in range(min(past_length, len(past))):
                    past.pop()  # because these windows have samples of the slow rank
        elif self.found.rank == rank:
            since = self.found.since
            named = self.phases.index(self.found.phase)
        of_phases = slowdown[:-1].view(2, -1).amax(0)
        of_phases[named] *= PHASE_MARGIN
        phase = self.phases[int(of_phases.argmax())]
        self.found = Straggler(rank, phase, float(slowdown[-1]), since)
        self._length = length


def level(window: Tensor) -> Tensor:
    """Return the mean of `window`, [samples, …], over samples; of only 3 samples the smaller of
    mean and median.
    """
    mean = window.mean(0)
    return torch.minimum(mean, window.median(0).values) if len(window) == min(WINDOWS) else mean


def compare(seconds: Tensor, shares: Tensor, *, begin: int) -> Sample:
    """Return as a `Sample` how much slower each of the W ranks is than the median of the others.

    seconds: [W, 2 P]: for each rank the times of the P phases, then the parts of these times in
    which the rank's thread did not run on a core; sums over some steps, the first of which follows
    optimizer step `begin`. shares: [W], images per rank in a step.
    """
    own = seconds[:, : seconds.shape[1] // 2]
    with_total = torch.cat([seconds, own.sum(1, keepdim=True)], 1)
    per_step = with_total - median_of_others(with_total)
    per_image = with_total - shares[:, None] * median_of_others(with_total / shares[:, None])
    excess = torch.minimum(per_step, per_image)
    others = (with_total - excess)[:, -1:]  # the time of a step of the others
    return Sample(begin, excess / others.clamp(min=1e-9), int(own.sum(0).argmax()))


def median_of_others(values: Tensor) -> Tensor:
    """Return for each row of `values`, [W, N], the median of the other rows: [W, N]. W is at least
    2.
    """
    ordered, ranks = values.sort(0)
    place = ranks.argsort(0)
    last = len(values) - 2
    middle = torch.zeros_like(values)
    for position in (last // 2, (last + 1) // 2):
        middle += ordered.gather(0, position + (place <= position).long()) / 2
    return middle
