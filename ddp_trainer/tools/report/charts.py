"""The curves of the runs as SVG paths."""

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from statistics import median_low
from typing import NamedTuple

from ddp_trainer.tools.report.metrics import CHARTS, Curve, Metrics
from ddp_trainer.tools.report.values import format_number, format_share

WIDTH = 320
HEIGHT = 170
"""The size of the plot inside a chart, in units of SVG."""
MAX_DOTS = 40


class Line(NamedTuple):
    """A curve: index of its run, first part of its tag (such as train), SVG path, last value.

    dots: an SVG path of the points, or "". marks: an SVG path of triangles above values cut off.
    """

    run: int
    kind: str
    path: str
    last: str
    dots: str
    marks: str


class Chart(NamedTuple):
    """A chart: its title, its lines, and the ticks of its y axis, each with coordinate and text.

    cut: the limit above which values are cut off, and the largest value; None if none is cut off.
    """

    title: str
    lines: list[Line]
    y_ticks: list[tuple[float, str]]
    cut: tuple[str, str] | None


class XAxis:
    """The x axis of all charts: epochs if `steps_per_epoch` is known for all `runs`, else steps.

    The x coordinates are in units of SVG, from 0 to `WIDTH`.
    """

    def __init__(self, runs: Sequence[Metrics]) -> None:
        epochs = [run.steps_per_epoch for run in runs]
        scales = epochs if all(epochs) else [1] * len(runs)
        end = max(run.last_step / scale for run, scale in zip(runs, scales, strict=True)) or 1.0
        self.name = "epoch" if all(epochs) else "step"
        self.units = [WIDTH / end / scale for scale in scales]
        """For each run, the distance between two steps."""
        self.ticks = [(round(WIDTH * x / end, 1), format_number(x)) for x in ticks(0.0, end)]
        """The x coordinate and the text of each tick."""
        self.changes = [
            (round(step * self.units[index], 1), index, world_size)
            for index, run in enumerate(runs)
            for step, world_size in run.trained
            if step
        ]


def build_charts(runs: Sequence[Metrics], x_axis: XAxis) -> list[Chart]:
    """Return a chart for each entry of `CHARTS` for which a run has values."""
    charts = []
    for title, tags in CHARTS.items():
        curves = [
            (index, tag, run.curves[tag])
            for tag in tags
            for index, run in enumerate(runs)
            if run.curves[tag]
        ]
        if curves:
            charts.append(build_chart(title, curves, x_axis))
    return charts


def build_chart(title: str, curves: Sequence[tuple[int, str, Curve]], x_axis: XAxis) -> Chart:
    """Return a chart. curves: for each line, the index of the run, the tag, and the values."""
    is_share = title == "Top-1"
    low, largest = limits([curve for _, _, curve in curves])
    high = spike_limit(curves, low, largest) if title == "Loss" else largest
    lines = []
    for index, tag, curve in curves:
        kind = tag.partition("/")[0]
        unit = x_axis.units[index]
        path = to_path(curve, x_unit=unit, low=low, high=high)
        dots = ""
        if kind == "eval" and len(curve) <= MAX_DOTS:
            dots = "".join(to_path([point], x_unit=unit, low=low, high=high) for point in curve)
        last = (format_share if is_share else format_number)(curve[-1][1])
        marks = to_marks([step * unit for step, value in shorten(curve) if value > high])
        lines.append(Line(index, kind, path, last, dots, marks))
    y_ticks = []
    for tick in ticks(low, high):
        label = f"{100 * tick:.4g} %" if is_share else format_number(tick)
        y_ticks.append((round(to_y(tick, low, high), 1), label))
    cut = (format_number(high), format_number(largest)) if high < largest else None
    return Chart(title, lines, y_ticks, cut)


def limits(curves: Iterable[Curve]) -> tuple[float, float]:
    """Return the limits of the y axis: minimum and maximum of the finite values, never equal."""
    values = [value for curve in curves for _, value in curve if not math.isnan(value)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    smallest = max(1e-9, 1e-3 * abs(high))
    margin = smallest if high - low < smallest else 0.0
    return low - margin, high + margin


def spike_limit(curves: Sequence[tuple[int, str, Curve]], low: float, largest: float) -> float:
    """Return the value of a loss at which spikes are cut off; `largest` if there are no spikes.

    There are spikes if `largest` is more than twice as high above `low` as the usual maximum of the
    runs. A run that is ten times as high as another does not count, because one run that diverges
    must not flatten the others.
    """
    maxima: dict[int, float] = {}
    for run, _, curve in curves:
        values = [value for _, value in curve if not math.isnan(value)]
        maxima[run] = max(maxima.get(run, low), usual_maximum(values or [low]))
    far = low + 10 * (median_low(maxima.values()) - low)
    usual = max((value for value in maxima.values() if value <= far), default=low) - low
    return low + 1.25 * usual if 0 < usual < (largest - low) / 2 else largest


def usual_maximum(values: Sequence[float]) -> float:
    """Return the 0.9 quantile of values in the order of their steps, or the first if it is larger.

    A first value that is a hundred times as large as the two that follow is left out.
    """
    if values[0] > 100 * max(map(abs, values[1:3]), default=math.inf):
        return usual_maximum(values[1:])
    return max(values[0], sorted(values)[int(0.9 * (len(values) - 1))])


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
    """Return an SVG path through the points of a curve, with a gap where the value is nan.

    Values above `high` are drawn at `high`.
    """
    parts = []
    is_gap = True
    for step, value in shorten(curve):
        if not math.isnan(value):
            point = f"{step * x_unit:.1f} {to_y(min(value, high), low, high):.1f}"
            # h0 is a line of length 0, so that a point without neighbours is visible too
            parts.append(f"M{point}h0" if is_gap else f"L{point}")
        is_gap = math.isnan(value)
    return "".join(parts)


def to_marks(places: Iterable[float]) -> str:
    """Return an SVG path with a triangle above the plot at each x, unless it overlaps another."""
    parts = []
    free = -math.inf
    for x in places:
        if x >= free:
            parts.append(f"M{x:.1f} -7l-4 6h8z")
            free = x + 9
    return "".join(parts)


def shorten(curve: Curve) -> list[tuple[int, float]]:
    """Return the points of a curve, sorted by step; a long curve is reduced.

    A curve of more than ``2 * WIDTH`` points is divided into at most `WIDTH` intervals. Of each
    interval, the points with the lowest and the highest value are kept, or one nan if no value is
    finite.
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
