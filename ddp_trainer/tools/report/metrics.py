"""Read the curves and the launches of a run from metrics.jsonl."""

import math
from dataclasses import dataclass, field
from typing import Any

from ddp_trainer.tools.report.files import FolderReader
from ddp_trainer.tools.report.values import number, whole

CHARTS = {
    "Loss": ("train/loss", "eval/loss"),
    "Top-1": ("train/top1", "eval/top1"),
    "Learning rate": ("optim/lr",),
    "Images per second": ("throughput/images_per_second",),
}
"""The tags of each chart, by its title."""


Curve = list[tuple[int, float]]
"""Step and value of each point of a curve; nan where the value is not finite."""


@dataclass(slots=True)
class Metrics:
    """The content of metrics.jsonl."""

    curves: dict[str, Curve] = field(
        default_factory=lambda: {tag: [] for tags in CHARTS.values() for tag in tags}
    )
    launches: list[tuple[int, int | None]] = field(default_factory=list)
    """The step after which each launch began, and its world size."""
    steps_per_epoch: int = 0
    """0: unknown."""
    last_step: int = 0
    eval_count: int | None = None
    """The number of samples in the last evaluation."""
    diverged_at: int | None = None
    """The step since which no training loss is finite; None if the last one is finite."""

    def add(self, record: dict[str, Any]) -> None:
        """Add a record: a launch, or values."""
        step = record["step"]
        if "launch/world_size" in record:
            self.launches.append((step, whole(record["launch/world_size"])))
            self.steps_per_epoch = whole(record.get("launch/steps_per_epoch")) or 0
            return

        self.last_step = max(self.last_step, step)
        self.eval_count = whole(record.get("eval/count", self.eval_count))
        for tag in self.curves.keys() & record.keys():
            value = number(record[tag])
            self.curves[tag].append((step, math.nan if value is None else value))
        if "train/loss" in record:
            is_finite = number(record["train/loss"]) is not None
            self.diverged_at = None if is_finite else self.diverged_at or step


def read_metrics(folder: FolderReader) -> Metrics:
    """Return the content of metrics.jsonl, without its damaged lines."""
    metrics = Metrics()
    for record in folder.read_json_lines("metrics.jsonl"):
        metrics.add(record)
    return metrics
