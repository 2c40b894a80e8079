"""Read metrics.jsonl, train.log and failure.log: tables of numbers, launches, the first value that
was not finite.
"""

import math
import re
from array import array
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ddp_trainer.tools.report.files import MB, RunFiles, number, text, whole

MAX_METRICS = 512 * MB
MAX_LOG = 64 * MB
MAX_TAGS = 200
"""Maximum number of tags of a run in the report, because a damaged file may have millions."""
MAX_LAUNCHES = 300
UNKNOWN_TIME = math.nan
YEAR_3000 = 3.25e10
LAUNCH = re.compile(r"INFO (\d{1,6}) × .{1,200} \(\w+\), ")
RESUMED = re.compile(r"INFO resumed from .*, step (\d{1,15})\)")
STEPS_PER_EPOCH = re.compile(r", (\d{1,15}) steps an epoch")
NOT_FINITE = re.compile(r"the loss or gradient of step (\d{1,15}) is not finite[^:]*")


@dataclass(slots=True)
class Table:
    """Values whose tags occur in the same records: a row for each record, sorted by step."""

    steps: list[int]
    times: list[float]
    """Unix seconds; nan where unknown."""
    columns: dict[str, list[float]]
    """Values of each row, by tag; nan where a value is not finite."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of the training: the first one, or a later one, which resumes the run if it has a
    checkpoint.
    """

    step: int
    """The number of steps that were already taken when the launch began; 0: it began without a
    checkpoint.
    """
    world_size: int | None
    time: float = UNKNOWN_TIME
    """Unix seconds."""
    gap_start: float = UNKNOWN_TIME
    """The time of the last record before the launch, in Unix seconds."""


@dataclass(slots=True)
class NonFinite:
    """The first training loss, or other training value, that was not finite."""

    step: int
    reason: str
    time: float = UNKNOWN_TIME


@dataclass(slots=True)
class Metrics:
    """The content of metrics.jsonl, train.log and failure.log."""

    tables: list[Table] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    nonfinite: NonFinite | None = None
    steps_per_epoch: int | None = None
    slowest: Counter[tuple[int, str]] = field(default_factory=Counter)
    """The number of records that name a straggler (a rank that slows down the others), by its rank
    and phase.
    """


class Records:
    """The records of metrics.jsonl, stored as columns: a value takes 16 bytes, so that large files
    fit into memory.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.columns: dict[str, tuple[array, array]] = {}
        """By tag: the indices of the rows that have this tag, and their values."""
        self.launches: list[Launch] = []
        self.nonfinite: NonFinite | None = None
        self.slowest: Counter[tuple[int, str]] = Counter()
        self.steps_per_epoch = 0
        self.has_more_tags = False
        self.last_time = UNKNOWN_TIME

    def add(self, record: dict[str, Any]) -> None:
        """Add a record with a step: to `launches` if it marks a start or resume of the run, else as
        a row of values.
        """
        step = record["step"]
        time = number(record.get("time"))
        time = UNKNOWN_TIME if time is None or not 0 < time < YEAR_3000 else float(time)
        epoch = whole(record.get("epoch"))
        if "launch/world_size" in record:
            self.launches.append(
                Launch(step, whole(record["launch/world_size"]), time, self.last_time)
            )
            return
        self.last_time = self.last_time if math.isnan(time) else time
        # the last step of epoch e is (e + 1) · steps_per_epoch, and no step of it is higher
        if epoch is not None:
            self.steps_per_epoch = max(self.steps_per_epoch, -(-step // (epoch + 1)))
        rank = whole(record.get("straggler/rank"))
        if rank is not None:
            self.slowest[rank, text(record.get("straggler/phase"), length=60)] += 1
        row = len(self.steps)
        self.steps.append(step)
        self.times.append(time)
        for tag, value in record.items():
            if tag not in ("step", "time", "epoch", "straggler/rank") and not is_share(tag, record):
                self.add_value(tag, value, row)

    def add_value(self, tag: str, value: object, row: int) -> None:
        """Add a value to the column of `tag`; text and other values that are not numbers are left
        out.
        """
        finite = number(value)
        if finite is None and not is_nonfinite(value):
            return
        if tag not in self.columns and len(self.columns) >= MAX_TAGS:
            self.has_more_tags = True
            return
        if finite is None and tag.startswith("train/") and self.nonfinite is None:
            self.nonfinite = NonFinite(self.steps[row], f"{tag} is {text(value)}", self.times[row])
        rows, values = self.columns.setdefault(tag, (array("q"), array("d")))
        rows.append(row)
        values.append(math.nan if finite is None else finite)

    def tables(self) -> list[Table]:
        """Return all values as tables; tags that occur in exactly the same records share a
        table.
        """
        groups: dict[bytes, list[str]] = {}
        for tag, (rows, _) in self.columns.items():
            groups.setdefault(rows.tobytes(), []).append(tag)
        return [self.table(tags) for tags in groups.values()]

    def table(self, tags: list[str]) -> Table:
        """Return the table of `tags`, which must all occur in the same records, sorted by step."""
        rows = self.columns[tags[0]][0]
        order = sorted(range(len(rows)), key=lambda place: self.steps[rows[place]])
        return Table(
            [self.steps[rows[place]] for place in order],
            [self.times[rows[place]] for place in order],
            {tag: [self.columns[tag][1][place] for place in order] for tag in tags},
        )


def is_share(tag: str, record: dict[str, Any]) -> bool:
    """Return whether `tag` (``…_fraction``) can be left out because `record` has the same phase as
    ``…_ms``.
    """
    return tag.endswith("_fraction") and tag.removesuffix("_fraction") + "_ms" in record


def is_nonfinite(value: object) -> bool:
    """Return whether a value of a record is nan or infinite, as a number or as a text such as
    "NaN".
    """
    if isinstance(value, str):
        return value.lower().lstrip("+-") in ("nan", "inf", "infinity")
    return isinstance(value, float) and not math.isfinite(value)


def read_metrics(files: RunFiles) -> Metrics:
    """Return the content of the three files. Damaged lines are left out and counted in
    `files.problems`.
    """
    records = Records()
    num_damaged = 0
    for record in files.read_records("metrics.jsonl", limit=MAX_METRICS):
        if record is None:
            num_damaged += 1
        else:
            records.add(record)
    if num_damaged:
        files.problems.append(
            f"metrics.jsonl has damaged lines, which were left out: {num_damaged:,}."
        )
    if records.has_more_tags:
        files.problems.append(
            f"metrics.jsonl has more than {MAX_TAGS} tags; the others were left out."
        )
    log = read_log(files)
    tables = records.tables()
    launch_time = records.launches[-1].time if records.launches else UNKNOWN_TIME
    return Metrics(
        tables=tables,
        launches=(records.launches or with_times(log.launches, tables))[-MAX_LAUNCHES:],
        nonfinite=records.nonfinite or read_failure(files, launch_time=launch_time),
        steps_per_epoch=log.steps_per_epoch or records.steps_per_epoch or None,
        slowest=records.slowest,
    )


def read_log(files: RunFiles) -> Metrics:
    """Return launches and steps per epoch from train.log; not its times, which lack a time zone."""
    found = Metrics()
    for line in files.read_lines("train.log", limit=MAX_LOG):
        if match := LAUNCH.search(line):
            found.launches.append(Launch(0, int(match[1])))
        elif (match := RESUMED.search(line)) and found.launches:
            found.launches[-1] = Launch(int(match[1]), found.launches[-1].world_size)
        elif match := STEPS_PER_EPOCH.search(line):
            found.steps_per_epoch = int(match[1]) or None
    return found


def read_failure(files: RunFiles, *, launch_time: float) -> NonFinite | None:
    """Return the step that was not finite, from failure.log; None if it names none, or is older
    than the last launch.

    launch_time: when the last launch began, in Unix seconds; nan: unknown.
    """
    with suppress(OSError):
        if (files.folder / "failure.log").stat().st_mtime < launch_time:
            return None
    matches = filter(None, map(NOT_FINITE.search, files.read_lines("failure.log", limit=MB)))
    return next((NonFinite(int(match[1]), match[0]) for match in matches), None)


def with_times(launches: list[Launch], tables: list[Table]) -> list[Launch]:
    """Return `launches`, each with the times of the last record before its start and of the first
    record after that.
    """
    moments = sorted(
        {moment for table in tables for moment in zip(table.steps, table.times, strict=True)}
    )
    moments = [(step, time) for step, time in moments if not math.isnan(time)]
    timed = []
    for launch in launches:
        place = bisect_right(moments, (launch.step, math.inf))
        if launch.step and 0 < place < len(moments):
            launch = Launch(
                launch.step, launch.world_size, moments[place][1], moments[place - 1][1]
            )
        timed.append(launch)
    return timed
