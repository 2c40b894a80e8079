"""Finds the straggler: the rank whose own work takes longer than that of the others, which wait for it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NAMED, CLEARED = 0.1, 0.05
"""A rank is named when its steps take so much longer than the median of the others, and cleared below the second."""
SAMPLES = 3
"""It is named after so many samples in a row, because a machine may do something else for a moment."""
SAMPLE_SECONDS = 0.1
"""A sample is at least so long: shorter ones show how the kernel schedules processes."""
PHASE_MARGIN = 2.0
"""Another phase of the named rank has to cost so many times more before it is named instead."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that slows all."""

    rank: int
    phase: str
    """Where it loses most of the time."""
    slowdown: float
    """Its own time of a step over the median of the other ranks, less 1."""
    since: int
    """The optimizer step after which it was first this slow."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of some steps, compared over ranks."""

    begin: int
    slowdown: Tensor
    """float64 [W]"""
    excess: Tensor
    """float64 [W, P]: the seconds by which a phase is longer than that of the other ranks."""

    @property
    def slowest(self) -> int | None:
        """The rank that is slow enough to be named; None if there is none."""
        rank = int(self.slowdown.argmax())
        return rank if self.slowdown[rank] >= NAMED else None


class StragglerFinder:
    """Compares the own times of ranks. Every rank adds the same times, and comes to the same result.

    phases: the names of the P phases. shares: how many images each of the W ranks has in a step. A rank counts as slow
    only if it is slow both by the step and by the image, so that a larger share of the batch is no fault.
    """

    def __init__(self, phases: Sequence[str], shares: Sequence[int]) -> None:
        self.phases, self.shares = phases, torch.tensor(shares, dtype=torch.float64)
        self.found: Straggler | None = None
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._begin: int | None = None
        self._seconds = torch.zeros(len(shares), len(phases), dtype=torch.float64)

    def add(self, seconds: Tensor, *, begin: int) -> None:
        """Add the own times of steps in a row, the first of which followed optimizer step `begin`: float64 [W, P]."""
        self._begin = begin if self._begin is None else self._begin
        self._seconds = self._seconds + seconds
        if self._seconds.sum(1).median() >= SAMPLE_SECONDS:
            self._samples.append(compare(self._seconds, self.shares, begin=self._begin))
            self._begin, self._seconds = None, torch.zeros_like(self._seconds)
            if len(self._samples) == SAMPLES:
                self.found = self._find()

    def _find(self) -> Straggler | None:
        """Return the straggler by the last samples, which may be the one that is named already."""
        slowdown = torch.stack([sample.slowdown for sample in self._samples]).mean(0)
        ranks = {sample.slowest for sample in self._samples}
        rank = ranks.pop() if len(ranks) == 1 else None
        if rank is None:
            if self.found is None or slowdown[self.found.rank] < CLEARED:
                return None
            rank = self.found.rank
        excess = torch.stack([sample.excess[rank] for sample in self._samples]).sum(0)
        phase, since = int(excess.argmax()), self._samples[0].begin
        if self.found is not None and self.found.rank == rank:
            since, named = self.found.since, self.phases.index(self.found.phase)
            phase = phase if excess[phase] > PHASE_MARGIN * excess[named] else named
        return Straggler(rank, self.phases[phase], float(slowdown[rank]), since)


def compare(seconds: Tensor, shares: Tensor, *, begin: int) -> Sample:
    """Return by how much each rank is slower than the median of the others. seconds: [W, P], shares: [W]."""
    with_total = torch.cat([seconds, seconds.sum(1, keepdim=True)], 1)
    per_step = with_total - median_of_others(with_total)
    per_image = with_total - shares[:, None] * median_of_others(with_total / shares[:, None])
    excess = torch.minimum(per_step, per_image)
    total, of_total = with_total[:, -1], excess[:, -1]
    return Sample(begin, of_total / (total - of_total).clamp(min=1e-9), excess[:, :-1])


def median_of_others(values: Tensor) -> Tensor:
    """Return for each row of `values`, [W, N], the median of the other rows: [W, N]. W is at least 2."""
    ordered, ranks = values.sort(0)
    place, last = ranks.argsort(0), len(values) - 2
    middle = torch.zeros_like(values)
    for position in (last // 2, (last + 1) // 2):
        middle += ordered.gather(0, position + (place <= position).long()) / 2
    return middle
