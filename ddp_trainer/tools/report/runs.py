"""Read a run directory for the report page: name, status, scores, config, versions, curves and
evaluations.
"""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from ddp_trainer.config.errors import require_run_dir
from ddp_trainer.tools.report.evaluations import read_evaluations
from ddp_trainer.tools.report.files import MB, Picture, RunFiles, number, text, whole
from ddp_trainer.tools.report.lanes import read_lanes
from ddp_trainer.tools.report.metrics import Metrics, read_metrics

MAX_KEYS = 1_000
MAX_DEPTH = 12
MAX_ITEMS = 50
"""Maximum number of keys of a config, of nested levels, and of items of a list that are shown: YAML
can be endless.
"""
MAX_PICTURE_BYTES = 8 * MB
MAX_PICTURE_SIDE = 8192
PICTURES = {
    "first_batch": ("First training batch", "The first images of training, after augmentation."),
    "class_sizes": ("Class sizes", "The number of training images of each class."),
}
NOT_SET = "—"


class Run:
    """The content of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        require_run_dir(run_dir)
        self.path = run_dir
        self.name = text(run_dir.resolve().name)
        self.files = RunFiles(run_dir)
        self.config = flatten(self.files.read_object("config.yaml", dict))
        self.versions = flatten(self.files.read_object("versions.json", dict))
        self.summary: dict[str, Any] = self.files.read_object("summary.json", dict)
        self.metrics: Metrics = read_metrics(self.files)
        self.ended_at = whole(self.summary.get("steps"))
        """The last step of the last launch that ended without a failure; None: unknown."""
        known = [launch for launch in self.metrics.launches if launch.time == launch.time]
        self.was_resumed = self.ended_at is not None and (
            self.last_step > self.ended_at
            or any(launch.step >= self.ended_at for launch in known[-1:])
        )
        """Whether a later launch has continued the run after that step, so that summary.json is not
        its result.
        """
        if self.was_resumed:
            self.summary = {}
        self.lanes = read_lanes(self.files)
        self.folders = read_evaluations(self.files)
        self.evaluations = {
            name: folder for name, folder in self.folders.items() if not folder.is_empty
        }

    @property
    def has_diverged(self) -> bool:
        """Whether a value was not finite after the last step of the last launch that ended without
        a failure.

        Only such a launch writes summary.json with its last step; without summary.json any step
        counts. An earlier value does not count: the training went on after it, for example because
        such updates are skipped.
        """
        nonfinite = self.metrics.nonfinite
        return nonfinite is not None and (self.ended_at is None or nonfinite.step > self.ended_at)

    @property
    def status(self) -> str:
        """How the run ended, in words: its status in summary.json, "diverged" or "not finished"."""
        if self.has_diverged:
            return "diverged"
        return text(self.summary.get("status"), length=40).replace("_", " ") or "not finished"

    @property
    def outcome(self) -> str:
        """The kind of `status`: "good" if the run finished, "bad" if it diverged, else "open"."""
        return (
            "bad"
            if self.has_diverged
            else "good"
            if self.status in ("finished", "max steps")
            else "open"
        )

    @property
    def warnings(self) -> list[str]:
        """A list of at most one sentence: that a value was not finite, or else that the last launch
        has no summary.
        """
        if self.metrics.nonfinite is not None:
            step = self.metrics.nonfinite.step
            reason = self.metrics.nonfinite.reason
            what = "The training diverged" if self.has_diverged else "A value was not finite"
            return [f"{what} at step {step:,}: {reason}."]
        if self.was_resumed:
            since = (
                f"The run was resumed after step {self.ended_at:,}, which is the last step of"
                " summary.json"
            )
            return [f"{since}: it is in progress, or it ended with an error."]
        if not self.summary:
            return [
                "There is no summary.json that can be read: the run is in progress, or it ended"
                " with an error."
            ]
        return []

    def facts(self) -> dict[str, str]:
        """Return what is known of steps, epochs, duration, ranks, speed and device: texts by name
        for the overview.
        """
        steps = whole(self.summary.get("steps"))
        speed = number(self.summary.get("images_per_second"))
        shown = {
            "steps": f"{steps if steps is not None else self.last_step:,}",
            "epochs": text(self.summary.get("epochs"), length=20),
            "duration": duration(number(self.summary.get("seconds")) or self.seconds_of_records),
            "ranks": self.world_sizes,
            "speed": "" if speed is None else f"{speed:,.0f} img/s",
            "device": text(self.summary.get("device"), length=60),
        }
        return {name: value for name, value in shown.items() if value}

    def scores(self) -> dict[str, str]:
        """Return last and best top-1 of the run, by name, as text in percent; {} if no sample was
        evaluated.

        Unknown values are left out.
        """
        if self.summary.get("eval/count", self.last_value("eval/count")) == 0:
            return {}
        split = text(self.summary.get("eval/split"), length=40) or "evaluation"
        values = {
            f"{split} top-1": self.summary.get("eval/top1", self.last_value("eval/top1")),
            "best top-1": self.summary.get("best_top1"),
        }
        return {
            name: f"{100 * share:.2f} %"
            for name, v in values.items()
            if (share := number(v)) is not None
        }

    @property
    def last_step(self) -> int:
        """The highest step in metrics.jsonl; 0 if it has no records."""
        return max((table.steps[-1] for table in self.metrics.tables), default=0)

    @property
    def seconds_of_records(self) -> float | None:
        """The seconds from the first to the last record; None if their times are unknown."""
        times = [time for table in self.metrics.tables for time in table.times if time == time]
        return max(times) - min(times) if times else None

    @property
    def world_sizes(self) -> str:
        """The world sizes of the launches as text, such as ``2 → 4``; if unknown, the world size in
        summary.json.
        """
        sizes = [launch.world_size for launch in self.metrics.launches if launch.world_size]
        known = [
            size for size, _ in groupby(sizes or [whole(self.summary.get("world_size"))]) if size
        ]
        return " → ".join(map(str, known[:8])) + (" …" if len(known) > 8 else "")

    def last_value(self, tag: str) -> float | None:
        """Return the value of `tag` at the highest step; None if metrics.jsonl has no
        value of it.
        """
        found = [
            (table.steps[-1], table.columns[tag][-1])
            for table in self.metrics.tables
            if tag in table.columns
        ]
        return max(found)[1] if found else None

    def pictures(self) -> list[tuple[str, str, Picture]]:
        """Return title, description and content of those pictures in the run's folder pictures/
        that the page shows.
        """
        limits = {"limit": MAX_PICTURE_BYTES, "max_side": MAX_PICTURE_SIDE}
        return [
            (title, about, picture)
            for name, (title, about) in PICTURES.items()
            if (picture := self.files.read_picture(f"pictures/{name}.png", **limits))
        ]

    def slowest_rows(self) -> list[list[str]]:
        """Return texts [rank, phase, count, percentage] of up to 10 stragglers (ranks that slow
        down the others).

        count: log records that name this rank and phase, largest first; percentage: of all records
        with a straggler.
        """
        counts = self.metrics.slowest
        return [
            [str(rank), phase or "unknown", f"{count:,}", f"{100 * count / counts.total():.0f} %"]
            for (rank, phase), count in counts.most_common(10)
        ]

    def launch_rows(self) -> list[list[str]]:
        """Return a row per launch: number, step, ranks, time in UTC, and the pause since the last
        record before it.
        """
        rows = []
        for place, launch in enumerate(self.metrics.launches, start=1):
            when = (
                ""
                if launch.time != launch.time
                else f"{datetime.fromtimestamp(launch.time, UTC):%Y-%m-%d %H:%M:%S}"
            )
            pause = launch.time - launch.gap_start
            rows.append(
                [
                    str(place),
                    f"{launch.step:,}",
                    text(launch.world_size),
                    when,
                    duration(pause) if pause == pause else "",
                ]
            )
        return rows

    def evaluate_command(self) -> str:
        """Return the command that evaluates this run."""
        return f"python -m ddp_trainer evaluate {shlex.quote(str(self.path))}"

    def problems(self) -> list[str]:
        """Return a sentence about each file of the run, or of its evaluations, that cannot
        be used.
        """
        return self.files.problems + [
            f"evaluation/{text(name)}/{problem}"
            for name, folder in self.folders.items()
            for problem in folder.files.problems
        ]


def flatten(tree: dict[Any, Any]) -> dict[str, str]:
    """Return nested dicts as one dict of texts, such as ``{"optimizer.lr": "0.1"}``, with at most
    `MAX_KEYS` keys.
    """
    flat: dict[str, str] = {}
    waiting = [((), tree)]
    while waiting and len(flat) < MAX_KEYS:
        place, value = waiting.pop()
        if isinstance(value, dict) and value and len(place) < MAX_DEPTH:
            waiting += [
                ((*place, text(key)), item)
                for key, item in reversed(list(value.items())[:MAX_KEYS])
            ]
        elif place:
            flat[text(".".join(place))] = as_text(value)
    return flat


def as_text(value: object, *, depth: int = 2) -> str:
    """Return a config's value as YAML writes it in one line; lists below `depth` levels, and dicts,
    as `repr` does.
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() if depth:
            items = [as_text(item, depth=depth - 1) for item in value[:MAX_ITEMS]]
            return text(f"[{', '.join(items)}{', …' if len(value) > MAX_ITEMS else ''}]")
    return text(value)


def compare(columns: Sequence[dict[str, str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return two lists of rows [key, value of each column]: of keys whose values differ, and of all
    keys.
    """
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(column.get(key, NOT_SET) for column in columns)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1], rows


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return a different name for each run: that of its directory, with parent folders if several
    have this name.
    """
    parts = [run.path.resolve().parts for run in runs]
    names = []
    for own in parts:
        length = next(
            size
            for size in range(1, len(own) + 1)
            if sum(other[-size:] == own[-size:] for other in parts) == 1
        )
        names.append(text("/".join(own[-length:])))
    return names


def duration(seconds: float | None) -> str:
    """Return a duration as text, for example ``1 h 2 min``; an empty text if it is None or
    negative.
    """
    if seconds is None or seconds < 0:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {seconds} s"
