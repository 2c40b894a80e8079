"""The own time of each rank, which is its time in a step without waiting for other ranks, over the
steps of a run.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from ddp_trainer.tools.report.files import MB, RunFiles, number

MAX_RANKS = 128
MAX_COLUMNS = 300
MAX_CELLS = 20_000
"""Maximum ranks, columns and cells on the page. Of more ranks, the slowest are shown; more steps
share a column.
"""
MAX_FILES = 1024
MAX_ENTRIES = 1_000_000
"""Maximum files of the folder flight, and maximum entries of all files together: damaged data may
have more.
"""
NOT_TIMES = {"step", "steps", "time", "memory_mb", "celsius"}
WHOLE = "whole run"
LAST = "last minutes before the failure"


class Entry(NamedTuple):
    """The own time of one rank, without waiting for other ranks, in one step or as the mean of
    several steps.
    """

    rank: int
    step: int
    """The step, or the last of several steps."""
    phases: dict[str, float]
    """Own time in milliseconds per step, by phase."""


@dataclass(slots=True)
class Lanes:
    """A lane for each of several ranks: its own time (without waiting for others) in columns of one
    or more steps.
    """

    title: str
    ranks: list[int]
    steps: list[int]
    """The last step of each column."""
    own_ms: list[list[float | None]]
    """Own time in milliseconds per step: a list for each of `ranks`, by column; None: unknown."""
    worst: list[tuple[int, str] | None] = field(default_factory=list)
    """For each column the index in `ranks` of the slowest rank, and its slow phase; None with fewer
    than 2 ranks.
    """

    def rows(self) -> list[list[str]]:
        """Return texts of the 16 slowest ranks: rank, mean ms per step without waiting, % above the
        median of `ranks`.

        The median is that of the means. If the run has more than `MAX_RANKS` ranks, only the
        slowest are in `ranks`.
        """
        means = {
            rank: mean([value for value in lane if value is not None])
            for rank, lane in zip(self.ranks, self.own_ms, strict=True)
        }
        middle = median(means.values()) or 1.0
        slowest = sorted(means, key=lambda rank: -means[rank])[:16]
        return [
            [str(rank), f"{means[rank]:,.2f} ms", f"{100 * (means[rank] / middle - 1):+.1f} %"]
            for rank in slowest
        ]

    def encode(self) -> dict[str, Any]:
        """Return the ranks' own times as JSON values for the report page, in milliseconds with 3
        significant digits.
        """
        rounded = [
            [None if value is None else float(f"{value:.3g}") for value in lane]
            for lane in self.own_ms
        ]
        return {
            "title": self.title,
            "ranks": self.ranks,
            "steps": self.steps,
            "own": rounded,
            "worst": self.worst,
        }


def read_lanes(files: RunFiles) -> list[Lanes]:
    """Return `Lanes` (times by rank) of the whole run (ranks.jsonl) and of its last minutes
    (flight/), if recorded.
    """
    found = [build_lanes(entries_of_run(files), WHOLE), build_lanes(entries_of_flight(files), LAST)]
    return [lanes for lanes in found if lanes is not None]


def entries_of_run(files: RunFiles) -> Iterator[Entry]:
    """Yield an `Entry` for each rank in each row of ranks.jsonl. A row has, for each phase, a list:
    each rank's ms.
    """
    for row in filter(None, files.read_records("ranks.jsonl", limit=64 * MB)):
        lists = {
            name: value
            for name, value in row.items()
            if name not in NOT_TIMES and isinstance(value, list)
        }
        for rank in range(min(map(len, lists.values()), default=0)):
            yield Entry(
                rank, row["step"], numbers({name: value[rank] for name, value in lists.items()})
            )


def entries_of_flight(files: RunFiles) -> Iterator[Entry]:
    """Yield an `Entry` for each row of flight/rank-<rank>.jsonl (written at a failure), with
    milliseconds by phase.
    """
    with suppress(OSError):
        names = sorted(path.name for path in (files.folder / "flight").glob("rank-*.jsonl"))
        for name in names[:MAX_FILES]:
            digits = name.removeprefix("rank-").removesuffix(".jsonl")
            records = (
                files.read_records(f"flight/{name}", limit=4 * MB) if digits.isdecimal() else ()
            )
            for row in filter(None, records):
                times = {key: value for key, value in row.items() if key not in NOT_TIMES}
                yield Entry(int(digits[:6]), row["step"], numbers(times))


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return those of `values` (by phase) that are valid times: finite numbers of at least 0."""
    known = {name[:60]: number(value) for name, value in values.items()}
    return {name: value for name, value in known.items() if value is not None and value >= 0}


def build_lanes(entries: Iterable[Entry], title: str) -> Lanes | None:
    """Return a lane (times by column) for each rank in `entries`; None if no entry has a time.

    Of more than `MAX_RANKS` ranks, the slowest are kept. A column is a step. If there are more than
    `MAX_COLUMNS` steps, or `MAX_CELLS` times, a column has the means of several steps.
    """
    known = [entry for _, entry in zip(range(MAX_ENTRIES), entries, strict=False) if entry.phases]
    if not known:
        return None
    by_rank: dict[int, list[float]] = defaultdict(list)
    for entry in known:
        by_rank[entry.rank].append(sum(entry.phases.values()))
    ranks = sorted(sorted(by_rank, key=lambda rank: -mean(by_rank[rank]))[:MAX_RANKS])
    places = {rank: place for place, rank in enumerate(ranks)}
    steps = sorted({entry.step for entry in known})
    columns = min(len(steps), MAX_COLUMNS, max(1, MAX_CELLS // len(ranks)))
    ends = [steps[(column + 1) * len(steps) // columns - 1] for column in range(columns)]
    cells: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for entry in known:
        if entry.rank in places:
            cells[places[entry.rank], bisect_left(ends, entry.step)].append(entry.phases)
    means = {
        cell: {
            name: mean([one.get(name, 0.0) for one in phases])
            for name in {n for p in phases for n in p}
        }
        for cell, phases in cells.items()
    }
    own = [
        [
            sum(means[place, column].values()) if (place, column) in means else None
            for column in range(columns)
        ]
        for place in range(len(ranks))
    ]
    worst = [
        slowest([means.get((place, column)) for place in range(len(ranks))])
        for column in range(columns)
    ]
    return Lanes(title, ranks, ends, own, worst)


def slowest(times: list[dict[str, float] | None]) -> tuple[int, str] | None:
    """Return the slowest rank's index and the phase where it most exceeds the other ranks; None:
    fewer than 2 ranks.
    """
    known = {place: one for place, one in enumerate(times) if one}
    if len(known) < 2:
        return None
    place = max(known, key=lambda place: sum(known[place].values()))
    others = [one for other, one in known.items() if other != place]
    excess = {
        name: value - median(one.get(name, 0.0) for one in others)
        for name, value in known[place].items()
    }
    return place, max(excess, key=lambda name: excess[name])


def mean(values: list[float]) -> float:
    """Return the mean of `values`; 0 if the list is empty."""
    return sum(values) / len(values) if values else 0.0
