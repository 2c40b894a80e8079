"""Read the curves and the launches of a run from metrics.jsonl."""

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ddp_trainer.tools.report.files import MB, FolderReader
from ddp_trainer.tools.report.values import number, whole

MAX_METRICS_BYTES = 512 * MB
MAX_LAUNCHES = 100
CHARTS = {
    "Loss": ("train/loss", "eval/loss"),
    "Top-1": ("train/top1", "eval/top1"),
    "Learning rate": ("optim/lr",),
    "Images per second": ("throughput/images_per_second",),
}
"""The tags of each chart, by its title."""


@dataclass(slots=True)
class Curve:
    """The values of a tag. A value takes 16 bytes, so that large files fit into memory."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))
    """nan where a value is not finite."""


@dataclass(slots=True)
class Metrics:
    """The content of metrics.jsonl."""

    curves: dict[str, Curve] = field(
        default_factory=lambda: {tag: Curve() for tags in CHARTS.values() for tag in tags}
    )
    launches: deque[tuple[int, int | None]] = field(
        default_factory=lambda: deque(maxlen=MAX_LAUNCHES)
    )
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
            self.curves[tag].steps.append(step)
            self.curves[tag].values.append(math.nan if value is None else value)
        if "train/loss" in record:
            is_finite = number(record["train/loss"]) is not None
            self.diverged_at = None if is_finite else self.diverged_at or step


def read_metrics(folder: FolderReader) -> Metrics:
    """Return the content of metrics.jsonl, without its damaged lines."""
    metrics = Metrics()
    for record in folder.read_json_lines("metrics.jsonl", limit=MAX_METRICS_BYTES):
        metrics.add(record)
    return metrics
