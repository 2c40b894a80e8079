"""The result of a launch: the content of summary.json and a line on the console."""

import json
import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

Status = StrEnum("Status", ["finished", "max_steps", "stopped", "stopped_early"])
"""How a launch ended: after all epochs, at max_steps, by a graceful stop, or by an observer."""


@dataclass(kw_only=True, slots=True)
class Summary:
    """The result of a launch, as in summary.json, where an unknown value is null, never NaN."""

    status: Status
    stop_reason: str | None = None
    """The reason for which an observer ended the training; null: no observer ended it."""
    eval_split: str
    """The split that was evaluated: validation or test."""
    eval_top1: float
    eval_loss: float | None
    eval_count: int
    best_top1: float
    """The top-1 of the checkpoint best.pt; 0 if there is none."""
    select_by: str = "eval/top1"
    """The value that has chosen best.pt."""
    best_value: float | None = None
    """This value of the checkpoint best.pt; null if there is none."""
    epochs: int
    steps: int
    skipped_updates: int = 0
    """Number of steps that have skipped their update, because gradients were not finite."""
    seconds: float
    """Wall-clock seconds of training and evaluation over all launches."""
    images_per_second: float | None = None
    """The speed of training, without evaluation, of all ranks: the median over log windows."""
    matmul_utilization: float | None = None
    """FLOP/s of the training, divided by the FLOP/s of a measured matrix product."""
    mfu: float | None = None
    """Model FLOPs utilization: FLOP/s of the training, divided by the rated peak of the GPU."""
    seconds_per_epoch: float | None = None
    world_size: int
    device: str
    backend: str
    sync: str
    weights_sha256: str | None = None
    """With shards: the hash of parameters and buffers, equal at every number of ranks."""
    rounds: int | None = None
    """With recovery.min_ranks: how many process groups have trained, over all launches."""
    lost_seconds: float | None = None
    """With recovery.min_ranks: the seconds from the loss of ranks to the next step, added up."""
    ranks_by_step: list[list[int]] = field(default_factory=list)
    """With recovery.min_ranks: for each process group, the step at which it began, and its size."""
    rank_own_ms: list[float] = field(default_factory=list)
    """For each rank, the mean milliseconds of a step, without the waits for other ranks."""

    def to_json(self) -> str:
        """Return the text of summary.json."""
        values = {key.replace("eval_", "eval/"): value for key, value in asdict(self).items()}
        known = {
            k: v if not isinstance(v, float) or math.isfinite(v) else None
            for k, v in values.items()
        }
        return json.dumps(known, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the summary that `to_json` has written.

        Raises:
            ValueError: `text` is not the text of a summary.
        """
        try:
            values: dict[str, Any] = {
                key.replace("eval/", "eval_"): value for key, value in json.loads(text).items()
            }
            values["status"] = Status(values["status"])
            numbers = ("eval_top1", "best_top1", "steps", "seconds", "skipped_updates")
            float(sum(values[name] for name in numbers if name in values))
            return cls(**values)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a summary: {error}") from error

    def line(self) -> str:
        """Return the line that a launch logs at its end, unless it was stopped."""
        where = f"{self.world_size} × {self.device} ({self.backend})"
        results = [
            f"{self.eval_split} acc {self.eval_top1:.4f}",
            f"{self.seconds_per_epoch:,.1f} s/epoch" if self.seconds_per_epoch is not None else "",
            f"{self.images_per_second:,.0f} img/s" if self.images_per_second is not None else "",
            f"{self.skipped_updates} of {self.steps} updates skipped" * (self.skipped_updates > 0),
        ]
        return f"{' · '.join(filter(None, results))} on {where}"


def read_summary(run_dir: Path, step: int) -> str:
    """Return the text of summary.json if its launch ended at `step`.

    Returns "" if it was stopped, or ended at another step, or the file is missing or invalid.
    """
    try:
        text = (run_dir / "summary.json").read_text()
        summary = Summary.from_json(text)
        return text if summary.steps == step and summary.status is not Status.stopped else ""
    except (OSError, ValueError):  # the caller then makes a new summary
        return ""
