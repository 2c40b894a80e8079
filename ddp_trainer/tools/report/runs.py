"""Read a run directory for the report: status, scores, config, versions, curves, evaluations."""

import json
import shlex
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from ddp_trainer.config.errors import require_run_dir
from ddp_trainer.tools.report.evaluations import read_evaluations
from ddp_trainer.tools.report.files import FolderReader, Picture
from ddp_trainer.tools.report.metrics import read_metrics
from ddp_trainer.tools.report.values import UNKNOWN, format_share, number, text, whole

MAX_KEYS = 1_000
MAX_DEPTH = 12
"""Maximum number of keys and of nested levels of a config, because YAML can be endless."""
PICTURES = {
    "first_batch": ("First training batch", "The first images of training, after augmentation."),
    "class_sizes": ("Class sizes", "The number of training images of each class."),
}


class Run:
    """The content of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        require_run_dir(run_dir)
        self.path = run_dir.resolve()
        self.folder = FolderReader(run_dir)
        self.config = flat_texts(self.folder.read_object("config.yaml", dict))
        self.versions = flat_texts(self.folder.read_object("versions.json", dict))
        self.metrics = read_metrics(self.folder)
        self.summary: dict[str, Any] = self.folder.read_object("summary.json", dict)
        self.was_resumed = self.continues_after(whole(self.summary.get("steps")))
        if self.was_resumed:
            self.summary = {}
        self.pictures = read_pictures(self.folder)
        folders = read_evaluations(self.folder)
        self.evaluations = [folder for folder in folders if not folder.is_empty]
        self.problems = self.folder.problems + [
            f"evaluation/{folder.name}/{problem}"
            for folder in folders
            for problem in folder.folder.problems
        ]

    def continues_after(self, step: int | None) -> bool:
        """Return whether a launch has continued the run after `step`, the last of summary.json."""
        if step is None:
            return False
        starts = [start for start, _ in self.metrics.launches]
        return self.metrics.last_step > step or starts[-1:] >= [step]

    @property
    def status(self) -> str:
        """How the run ended: the status in summary.json, "diverged" or "not finished"."""
        unknown = "not finished" if self.metrics.diverged_at is None else "diverged"
        return text(self.summary.get("status"), length=40).replace("_", " ") or unknown

    @property
    def outcome(self) -> str:
        """The kind of `status`: "good" if the run finished, "bad" if it diverged, else "open"."""
        kinds = {"finished": "good", "max steps": "good", "diverged": "bad"}
        return kinds.get(self.status, "open")

    def scores(self) -> dict[str, str]:
        """Return last and best top-1 as text, by name; {} if no sample was evaluated."""
        if self.summary.get("eval/count", self.metrics.eval_count) == 0:
            return {}
        split = text(self.summary.get("eval/split"), length=40) or "evaluation"
        _, top1 = (self.metrics.curves["eval/top1"] or [(0, None)])[-1]
        scores = {
            f"{split} top-1": format_share(self.summary.get("eval/top1", top1)),
            "best top-1": format_share(self.summary.get("best_top1")),
        }
        return {name: value for name, value in scores.items() if value != UNKNOWN}

    @property
    def world_sizes(self) -> str:
        """The world sizes of the launches, such as ``2 → 4``."""
        sizes = [size for _, size in self.metrics.launches if size]
        changes = [size for size, _ in groupby(sizes)]
        return " → ".join(map(str, changes)) or text(self.summary.get("world_size"))

    def evaluate_command(self) -> str:
        """Return the command that evaluates this run."""
        return f"python -m ddp_trainer evaluate {shlex.quote(str(self.path))}"


def read_pictures(folder: FolderReader) -> list[tuple[str, str, Picture]]:
    """Return title, description and content of the pictures that the page shows."""
    pictures = []
    for name, (title, about) in PICTURES.items():
        picture = folder.read_picture(f"pictures/{name}.png")
        if picture is not None:
            pictures.append((title, about, picture))
    return pictures


def flat_texts(tree: dict[Any, Any]) -> dict[str, str]:
    """Return nested dicts as one dict, such as ``{"optimizer.lr": "0.1"}``, of `MAX_KEYS` keys."""
    flat: dict[str, str] = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while waiting and len(flat) < MAX_KEYS:
        place, value = waiting.pop()
        if isinstance(value, dict) and value and len(place) < MAX_DEPTH:
            items = list(value.items())[:MAX_KEYS]
            waiting += [((*place, text(key)), item) for key, item in reversed(items)]
        elif place:
            is_constant = value is None or isinstance(value, bool)
            flat[text(".".join(place))] = json.dumps(value) if is_constant else text(value)
    return flat


def rows_by_key(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    """Return a row [key, value in each of `columns`] for each key, in the order of the keys."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return [[key, *(column.get(key, UNKNOWN) for column in columns)] for key in keys]


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return the name of each run's directory, or the path if several runs have this name."""
    names = [run.path.name for run in runs]
    return [
        text(str(run.path) if names.count(run.path.name) > 1 else run.path.name) for run in runs
    ]


def duration(seconds: object) -> str:
    """Return a duration as text, for example ``1:02:05``; "" if it is unknown."""
    known = number(seconds)
    return str(timedelta(seconds=round(known))) if known and 0 < known < 1e9 else ""
