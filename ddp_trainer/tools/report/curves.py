"""The curves of the report page as compact JSON values; of too many values, the longest curves keep
fewer points.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ddp_trainer.tools.report.metrics import Metrics, Table

MAX_POINTS = 200_000
"""If all curves of a report together have more values than this, the longest tables are shortened.
"""
DIGITS = 6


def rows_allowed(tables: Sequence[Table], *, limit: int = MAX_POINTS) -> int | None:
    """Return the maximum rows of a table so that all tables together have at most `limit` values;
    None: no maximum.
    """
    sizes = [(len(table.steps), len(table.columns)) for table in tables]
    longest = max((rows for rows, _ in sizes), default=0)

    def num_values(most: int) -> int:
        return sum(min(rows, most) * columns for rows, columns in sizes)

    if num_values(longest) <= limit:
        return None
    return max(2, bisect_right(range(longest), limit, key=num_values) - 1)


def shorten(table: Table, *, rows: int) -> Table:
    """Return `table` with at most `rows` rows: it is cut into intervals, and each interval becomes
    two rows.

    The two rows keep the interval's first and last step, and each column's minimum and maximum in
    order of occurrence. For the phases of a step both rows have the mean, so that the sum of the
    phases is still the time of a step.
    """
    total = len(table.steps)
    buckets = max(1, rows // 2)
    if total <= rows:
        return table
    edges = [number * total // buckets for number in range(buckets + 1)]
    places = [place for start, end in pairwise(edges) for place in (start, end - 1)]
    columns = {}
    for tag, values in table.columns.items():
        shown = (
            means
            if tag.startswith("time/") and tag.endswith("_ms") and tag != "time/step_ms"
            else extremes
        )
        columns[tag] = [
            value for start, end in pairwise(edges) for value in shown(values[start:end])
        ]
    return Table(
        [table.steps[place] for place in places], [table.times[place] for place in places], columns
    )


def extremes(values: list[float]) -> tuple[float, float]:
    """Return minimum and maximum of `values`, the earlier one first, ignoring nan; (nan, nan) if
    all are nan.
    """
    finite = [value for value in values if value == value]
    if not finite:
        return math.nan, math.nan
    low = min(finite)
    high = max(finite)
    return (low, high) if finite.index(low) <= finite.index(high) else (high, low)


def means(values: list[float]) -> tuple[float, float]:
    """Return the mean of `values` twice, for two rows. nan values are ignored; the mean is nan if
    all are nan.
    """
    finite = [value for value in values if value == value]
    mean = sum(finite) / len(finite) if finite else math.nan
    return mean, mean


def encode(metrics: Metrics, *, rows: int | None) -> dict[str, Any]:
    """Return a run's curves as JSON values for the report page. rows: maximum rows of a table;
    None: no maximum.
    """
    tables = [shorten(table, rows=rows) if rows else table for table in metrics.tables]
    start = start_time(metrics)
    launches = [
        {
            "step": launch.step,
            "ranks": launch.world_size,
            "time": ticks(launch.time, start),
            "gap": ticks(launch.gap_start, start),
        }
        for launch in metrics.launches
    ]
    nonfinite = metrics.nonfinite and {
        "step": metrics.nonfinite.step,
        "time": ticks(metrics.nonfinite.time, start),
    }
    return {
        "stepsPerEpoch": metrics.steps_per_epoch,
        "launches": launches,
        "nonfinite": nonfinite,
        "tables": [encode_table(table, start) for table in tables],
    }


def encode_table(table: Table, start: float) -> dict[str, Any]:
    """Return a table as JSON values: a list of steps, a list of times, and for each tag a list of
    rounded values.

    Steps and times are stored as differences from the row before. Times are in units of 10 ms after
    `start`, which is in Unix seconds.
    """
    times = []
    last = 0
    for time in table.times:
        last = ticks(time, start) if not math.isnan(time) else last
        times.append(last)
    return {
        "steps": differences(table.steps),
        "times": differences(times),
        "columns": {
            tag: [rounded(value) for value in values] for tag, values in table.columns.items()
        },
    }


def start_time(metrics: Metrics) -> float:
    """Return the time of the first launch or record of a run, in Unix seconds; 0 if no time is
    known.
    """
    times = [launch.time for launch in metrics.launches]
    times += [time for table in metrics.tables for time in table.times]
    return min((time for time in times if not math.isnan(time)), default=0.0)


def ticks(time: float, start: float) -> int | None:
    """Return how long `time` is after `start`, in units of 10 ms; None if `time` is nan. Both: Unix
    seconds.
    """
    return None if math.isnan(time) else round((time - start) * 100)


def differences(values: Sequence[int]) -> list[int]:
    """Return the first value unchanged, and for each later value its difference from the value
    before it.
    """
    return [value - before for before, value in pairwise([0, *values])]


def rounded(value: float) -> float | int | None:
    """Return `value` rounded to `DIGITS` significant digits; a whole number unrounded, as int; None
    for nan.
    """
    if value != value:
        return None
    if abs(value) < 2**53 and value == int(value):
        return int(value)
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if abs(value) < 2**53 and value == int(value) else value
