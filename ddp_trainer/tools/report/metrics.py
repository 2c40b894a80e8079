"""Read the curves and the launches of a run from metrics.jsonl."""

import math
from typing import Any

from ddp_trainer.tools.folder_reader import FolderReader, number, whole

CHARTS = {
    "Loss": ("train/loss", "eval/loss"),
    "Top-1": ("train/top1", "eval/top1"),
    "Learning rate": ("optim/lr",),
    "Images per second": ("throughput/images_per_second",),
}
"""The tags of each chart, by its title."""

Curve = list[tuple[int, float]]
"""The step and the value of each point of a curve; a value that is not finite is nan."""


class Metrics:
    """The content of metrics.jsonl, without its damaged lines."""

    def __init__(self, folder: FolderReader) -> None:
        self.curves: dict[str, Curve] = {tag: [] for tags in CHARTS.values() for tag in tags}
        self.launches: list[tuple[int, int | None]] = []
        """The step after which each launch began, and its world size."""
        self.trained: list[tuple[int, int | None]] = []
        """Those of `launches` that have a record of training, and the changes of the world size
        within a launch.
        """
        self.has_trained = False
        """Whether the last launch has a record of training."""
        self.steps_per_epoch = 0
        """The optimizer steps per epoch in the last launch; 0: unknown."""
        self.last_step = 0
        self.diverged_at: int | None = None
        """The step since which no training loss is finite; None if the last one is finite."""
        for record in folder.read_json_lines("metrics.jsonl"):
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, which describes a launch or has values of a step."""
        step = record["step"]
        if "launch/world_size" in record:
            self.launches.append((step, whole(record["launch/world_size"])))
            self.steps_per_epoch = whole(record.get("launch/steps_per_epoch")) or 0
            self.has_trained = False
            return

        if "train/loss" in record:
            self.add_world_size(step, whole(record.get("recovery/world_size")))
        self.last_step = max(self.last_step, step)
        for tag in self.curves.keys() & record.keys():
            value = number(record[tag])
            self.curves[tag].append((step, math.nan if value is None else value))
        if "train/loss" in record:
            is_finite = number(record["train/loss"]) is not None
            self.diverged_at = None if is_finite else self.diverged_at or step

    def add_world_size(self, step: int, world_size: int | None) -> None:
        """Add the last launch when it has trained, and a change of its world size.

        world_size: that of the record of `step`, if ranks may be lost.
        """
        if self.launches and not self.has_trained:
            self.trained.append(self.launches[-1])
            self.has_trained = True
        if world_size and self.trained and world_size != self.trained[-1][1]:
            self.trained.append((step, world_size))

    @property
    def best_step(self) -> int:
        """The step of best.pt, by the evaluations at the ends of epochs; 0: unknown."""
        length = self.steps_per_epoch or 1
        points = [(top1, -step) for step, top1 in self.curves["eval/top1"] if step % length == 0]
        return -max((point for point in points if point[0] <= 1), default=(0, 0))[1]  # not nan
