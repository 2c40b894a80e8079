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
    """Why an observer ended the training; null: it did not."""
    eval_split: str
    """The split that was evaluated: test, or validation (data.validation_fraction)."""
    eval_top1: float
    eval_loss: float | None
    eval_count: int
    best_top1: float
    epochs: int
    steps: int
    seconds: float
    """Wall-clock seconds of training and evaluation over all launches."""
    images_per_second: float | None = None
    """The speed of training, without evaluation, of all ranks: the median over log windows."""
    matmul_utilization: float | None = None
    """Operations per second of the training, divided by those of a measured matrix product."""
    mfu: float | None = None
    """Model FLOPs utilization: operations per second, divided by the rated peak of the GPU."""
    seconds_per_epoch: float | None = None
    world_size: int
    device: str
    backend: str
    sync: str
    rank_own_ms: list[float] = field(default_factory=list)
    """For each rank: the mean milliseconds of a step, without waiting for other ranks."""

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
        """Return the summary for a `text` that `to_json` returned; ValueError for any
        other text.
        """
        try:
            values: dict[str, Any] = {
                key.replace("eval/", "eval_"): value for key, value in json.loads(text).items()
            }
            values["status"] = Status(values["status"])
            return cls(**values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a summary: {error}") from error

    def line(self) -> str:
        """Return the line that a launch logs at its end, unless it was stopped."""
        where = f"{self.world_size} × {self.device} ({self.backend})"
        speed = [
            f"{self.seconds_per_epoch:,.1f} s/epoch" if self.seconds_per_epoch is not None else "",
            f"{self.images_per_second:,.0f} img/s" if self.images_per_second is not None else "",
        ]
        return (
            f"{self.eval_split} acc {self.eval_top1:.4f} · {' · '.join(filter(None, speed))} on"
            f" {where}"
        )


def read_summary(run_dir: Path, step: int) -> str:
    """Return the text of summary.json if it is valid and of a launch that ended, not stopped, at
    `step`; else "".
    """
    try:
        text = (run_dir / "summary.json").read_text()
        summary = Summary.from_json(text)
        return text if summary.steps == step and summary.status is not Status.stopped else ""
    except (OSError, ValueError):  # a missing or damaged summary is made again
        return ""
