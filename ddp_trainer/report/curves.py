"""The numbers of a page in a compact form: rounded, as differences, and shortened if there are very many."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ddp_trainer.report.metrics import Metrics, Table

MAX_POINTS = 200_000
"""Number of values in all curves of a report above which the longest tables are shortened."""
DIGITS = 6


def rows_allowed(tables: Sequence[Table], *, limit: int = MAX_POINTS) -> int | None:
    """Return the number of rows to which the longest tables must be shortened; None if all fit into `limit` values."""
    sizes = [(len(table.steps), len(table.columns)) for table in tables]
    longest = max((rows for rows, _ in sizes), default=0)

    def num_values(most: int) -> int:
        return sum(min(rows, most) * columns for rows, columns in sizes)

    if num_values(longest) <= limit:
        return None
    return max(2, bisect_right(range(longest), limit, key=num_values) - 1)


def shorten(table: Table, *, rows: int) -> Table:
    """Return `table` with at most `rows` rows: two for each interval of rows, at its first and its last step.

    The two rows have the minimum and the maximum of a column, in the order in which they occur. The phases of a step
    have their mean in both rows, so that their sum stays the time of a step.
    """
    total, buckets = len(table.steps), max(1, rows // 2)
    if total <= rows:
        return table
    edges = [number * total // buckets for number in range(buckets + 1)]
    places = [place for start, end in pairwise(edges) for place in (start, end - 1)]
    columns = {}
    for tag, values in table.columns.items():
        shown = means if tag.startswith("time/") and tag.endswith("_ms") and tag != "time/step_ms" else extremes
        columns[tag] = [value for start, end in pairwise(edges) for value in shown(values[start:end])]
    return Table([table.steps[place] for place in places], [table.times[place] for place in places], columns)


def extremes(values: list[float]) -> tuple[float, float]:
    """Return minimum and maximum of `values` without nan, in order of occurrence; (nan, nan) if all are nan."""
    finite = [value for value in values if value == value]
    if not finite:
        return math.nan, math.nan
    low, high = min(finite), max(finite)
    return (low, high) if finite.index(low) <= finite.index(high) else (high, low)


def means(values: list[float]) -> tuple[float, float]:
    """Return the mean of `values`, without nan, twice; (nan, nan) if all are nan."""
    finite = [value for value in values if value == value]
    mean = sum(finite) / len(finite) if finite else math.nan
    return mean, mean


def encode(metrics: Metrics, *, rows: int | None) -> dict[str, Any]:
    """Return the curves of a run for the page: steps and times as differences, times in units of 10 ms."""
    tables = [shorten(table, rows=rows) if rows else table for table in metrics.tables]
    start = start_time(metrics)
    launches = [
        {"step": launch.step, "ranks": launch.world_size, "time": ticks(launch.time, start),
         "gap": ticks(launch.gap_start, start)}
        for launch in metrics.launches
    ]  # fmt: skip
    nonfinite = metrics.nonfinite and {"step": metrics.nonfinite.step, "time": ticks(metrics.nonfinite.time, start)}
    return {
        "stepsPerEpoch": metrics.steps_per_epoch,
        "launches": launches,
        "nonfinite": nonfinite,
        "tables": [encode_table(table, start) for table in tables],
    }


def encode_table(table: Table, start: float) -> dict[str, Any]:
    """Return the data of a table for the page."""
    times, last = [], 0
    for time in table.times:
        last = ticks(time, start) if not math.isnan(time) else last
        times.append(last)
    return {
        "steps": differences(table.steps),
        "times": differences(times),
        "columns": {tag: [rounded(value) for value in values] for tag, values in table.columns.items()},
    }


def start_time(metrics: Metrics) -> float:
    """Return the time, in unix seconds, of the first launch or record of a run; 0 if none is known."""
    times = [launch.time for launch in metrics.launches]
    times += [time for table in metrics.tables for time in table.times]
    return min((time for time in times if not math.isnan(time)), default=0.0)


def ticks(time: float, start: float) -> int | None:
    """Return a time in units of 10 ms after `start`; None if it is unknown."""
    return None if math.isnan(time) else round((time - start) * 100)


def differences(values: Sequence[int]) -> list[int]:
    """Return the first value, and for each later value its difference to the value before it."""
    return [value - before for before, value in pairwise([0, *values])]


def rounded(value: float) -> float | int | None:
    """Return a number with `DIGITS` significant digits, and a whole one as an int; None for nan."""
    if value != value:
        return None
    if abs(value) < 2**53 and value == int(value):
        return int(value)
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if abs(value) < 2**53 and value == int(value) else value
