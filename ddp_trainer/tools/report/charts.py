"""The curves of the runs as SVG paths."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ddp_trainer.tools.report.metrics import CHARTS, Curve, Metrics
from ddp_trainer.tools.report.values import format_number, format_share

WIDTH = 320
HEIGHT = 170
"""The size of the plot inside a chart, in units of SVG."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve in a chart: the index of its run, the first part of its tag, and its last value."""

    run: int
    kind: str
    path: str
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: its lines, and the places and texts of the ticks of its y axis."""

    title: str
    lines: list[Line]
    y_ticks: list[tuple[float, str]]


class XAxis:
    """The x axis of all charts: the epoch if all `runs` know their steps per epoch, else the step.

    Ticks are places and texts; resumes are places, indices of runs, and world sizes.
    """

    def __init__(self, runs: Sequence[Metrics]) -> None:
        epochs = [run.steps_per_epoch for run in runs]
        scales = epochs if all(epochs) else [1] * len(runs)
        end = max(run.last_step / scale for run, scale in zip(runs, scales, strict=True)) or 1.0
        self.name = "epoch" if all(epochs) else "step"
        self.units = [WIDTH / end / scale for scale in scales]
        self.ticks = [(WIDTH * tick / end, format_number(tick)) for tick in ticks(0.0, end)]
        self.resumes = [
            (step * self.units[place], place, world_size)
            for place, run in enumerate(runs)
            for step, world_size in run.launches
            if step
        ]


def build_charts(runs: Sequence[Metrics], x_axis: XAxis) -> list[Chart]:
    """Return the charts that have values."""
    charts = []
    for title, tags in CHARTS.items():
        curves = [(place, tag, run.curves[tag]) for tag in tags for place, run in enumerate(runs)]
        curves = [(place, tag, curve) for place, tag, curve in curves if curve]
        if curves:
            charts.append(build_chart(title, curves, x_axis))
    return charts


def build_chart(title: str, curves: Sequence[tuple[int, str, Curve]], x_axis: XAxis) -> Chart:
    """Return a chart. curves: the index of the run, the tag and the values of each line."""
    is_share = title == "Top-1"
    low, high = limits([curve for _, _, curve in curves])
    lines = []
    for place, tag, curve in curves:
        path = to_path(curve, x_unit=x_axis.units[place], low=low, high=high)
        last = (format_share if is_share else format_number)(curve[-1][1])
        lines.append(Line(place, tag.partition("/")[0], path, last))
    y_ticks = []
    for tick in ticks(low, high):
        label = f"{100 * tick:.4g} %" if is_share else format_number(tick)
        y_ticks.append((to_y(tick, low, high), label))
    return Chart(title, lines, y_ticks)


def limits(curves: Iterable[Curve]) -> tuple[float, float]:
    """Return minimum and maximum of all values that are finite, at least a little apart."""
    values = [value for curve in curves for _, value in curve if not math.isnan(value)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    smallest = max(1e-9, 1e-3 * abs(high))
    margin = smallest if high - low < smallest else 0.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Return up to six multiples of 1, 2 or 5 times a power of 10 from `low` to `high`."""
    smallest = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(smallest))
    size = next(part * power for part in (1, 2, 5, 10) if part * power >= smallest)
    return [place * size for place in range(math.ceil(low / size), math.floor(high / size) + 1)]


def to_y(value: float, low: float, high: float) -> float:
    """Return the y coordinate of `value` on an axis from `low` to `high`."""
    return HEIGHT * (high - value) / (high - low)


def to_path(curve: Curve, *, x_unit: float, low: float, high: float) -> str:
    """Return an SVG path through the points of a curve, with a gap where a value is nan."""
    parts = []
    is_gap = True
    for step, value in shorten(curve):
        if not math.isnan(value):
            place = f"{step * x_unit:.1f} {to_y(value, low, high):.1f}"
            # h0, so that a point without neighbours is drawn too
            parts.append(f"M{place}h0" if is_gap else f"L{place}")
        is_gap = math.isnan(value)
    return "".join(parts)


def shorten(curve: Curve) -> list[tuple[int, float]]:
    """Return the points of a curve by step; of a long one, the extremes of `WIDTH` intervals.

    An interval without finite values becomes one nan.
    """
    points = sorted(curve, key=itemgetter(0))
    size = math.ceil(len(points) / WIDTH)
    if size <= 2:
        return points
    short = []
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        finite = [point for point in interval if not math.isnan(point[1])] or interval[:1]
        short += sorted({min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))})
    return short
