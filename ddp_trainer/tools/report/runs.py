"""Read a run directory for the report: status, scores, config, versions, curves, evaluations."""

import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from ddp_trainer.config.keys import naming_keys
from ddp_trainer.config.run_dirs import require_run_dir
from ddp_trainer.tools.folder_reader import FolderReader, text, whole
from ddp_trainer.tools.report.evaluations import read_evaluations
from ddp_trainer.tools.report.metrics import Metrics
from ddp_trainer.tools.report.values import UNKNOWN, format_share

MAX_KEYS = 1_000
MAX_DEPTH = 12
"""Limits on the keys and nested levels of a config, because aliases can make YAML endless."""
MAX_LABEL_KEYS = 6


class Run:
    """The content of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        require_run_dir(run_dir)
        self.path = run_dir.resolve()
        folder = FolderReader(run_dir)
        self.config = flat_texts(folder.read_object("config.yaml", dict))
        self.versions = flat_texts(folder.read_object("versions.json", dict))
        self.metrics = Metrics(folder)
        self.summary: dict[str, Any] = folder.read_object("summary.json", dict)
        steps = whole(self.summary.get("steps"))
        starts = [start for start, _ in self.metrics.launches]
        self.was_resumed = steps is not None and (
            self.metrics.last_step > steps or starts[-1:] >= [steps]
        )
        """Whether a launch has continued the run after the one that wrote summary.json."""
        if self.was_resumed:
            self.summary = {}
        self.evaluated = self.summary if self.summary.get("eval/count") else {}
        """The values in summary.json; {} if no sample was evaluated."""
        self.first_batch = folder.read_picture("pictures/first_batch.png")
        self.evaluations = read_evaluations(folder)
        self.bad_images = {  # the entries of each file that lists images which could not be read
            name: list(folder.read_json_lines(name, is_bad_image))
            for name in ("bad_images.jsonl", "evaluation/bad_images.jsonl")
        }
        self.problems = folder.problems + [
            f"evaluation/{evaluation.name}/{problem}"
            for evaluation in self.evaluations
            for problem in evaluation.folder.problems
        ]

    @property
    def status(self) -> str:
        """How the run ended: the status in summary.json, "diverged" or "not finished"."""
        unknown = "not finished" if self.metrics.diverged_at is None else "diverged"
        return text(self.summary.get("status")).replace("_", " ") or unknown

    @property
    def outcome(self) -> str:
        """The kind of `status`: "good" if the run finished, "bad" if it diverged, else "open"."""
        kinds = {"finished": "good", "max steps": "good", "diverged": "bad"}
        return kinds.get(self.status, "open")

    def scores(self) -> dict[str, str]:
        """Return last and best top-1 in summary.json as text; {} if no sample was evaluated."""
        if not self.evaluated:
            return {}
        split = text(self.evaluated.get("eval/split"))
        scores = {
            f"{split} top-1": format_share(self.evaluated.get("eval/top1")),
            "best top-1": format_share(self.evaluated.get("best_top1")),
        }
        select_by = text(self.evaluated.get("select_by", "eval/top1"))
        if select_by != "eval/top1":
            scores[f"best {select_by}"] = text(self.evaluated.get("best_value"))
        return scores

    @property
    def world_sizes(self) -> str:
        """The world sizes with which it has trained, such as ``2 → 4``."""
        launches = self.metrics.trained or self.metrics.launches[-1:]
        sizes = [size for _, size in launches if size]
        changes = [size for size, _ in groupby(sizes)]
        return " → ".join(map(str, changes)) or text(self.summary.get("world_size"))

    def evaluate_command(self) -> str:
        """Return the command that evaluates this run."""
        return f"python -m ddp_trainer evaluate {shlex.quote(str(self.path))}"


def flat_texts(tree: dict[Any, Any]) -> dict[str, str]:
    """Return nested dicts as one, like ``{"optimizer.lr": "0.1"}``, of at most `MAX_KEYS` keys."""
    return dict(islice(flat_items(tree), MAX_KEYS))


def flat_items(tree: dict[Any, Any], *place: str) -> Iterator[tuple[str, str]]:
    """Yield dotted key and text of each value in nested dicts. place: the keys above `tree`."""
    for key, value in tree.items():
        keys = (*place, text(key))
        if isinstance(value, dict) and value and len(keys) < MAX_DEPTH:
            yield from flat_items(value, *keys)
        else:
            is_constant = value is None or isinstance(value, bool)
            yield text(".".join(keys)), json.dumps(value) if is_constant else text(value)


def rows_by_key(columns: Sequence[dict[str, str]]) -> list[list[str]]:
    """Return a row [key, value in each of `columns`] for each key, in the order of the keys."""
    keys = dict.fromkeys(chain.from_iterable(columns))
    return [[key, *(column.get(key, UNKNOWN) for column in columns)] for key in keys]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run, no two equal.

    A label lists the values of `naming_keys`, for example ``optimizer.lr=0.1, seed=1``. If several
    runs have the same label or none, the name of the directory is added, or else its path.
    """
    keys = naming_keys([run.config for run in runs if run.config])[:MAX_LABEL_KEYS]
    settings = [
        ", ".join(f"{key.removesuffix('.name')}={run.config[key]}" for key in keys if run.config)
        for run in runs
    ]
    labels = settings
    for places in ([run.path.name for run in runs], [str(run.path) for run in runs]):
        labels = [
            label if label and labels.count(label) == 1 else f"{base} ({place})" if base else place
            for label, base, place in zip(labels, settings, places, strict=True)
        ]
    return [text(label) for label in labels]


def is_bad_image(entry: dict[str, Any]) -> bool:
    """Return whether a line of bad_images.jsonl has a path and a reason."""
    return isinstance(entry.get("path"), str) and isinstance(entry.get("reason"), str)
