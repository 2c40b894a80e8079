"""What a launch came to: the content of summary.json and the last line on the console."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Status(Enum):
    """How a launch ended: all epochs trained, at max_steps, or softly stopped before either."""

    finished = "finished"
    max_steps = "max_steps"
    stopped = "stopped"


@dataclass(kw_only=True, slots=True)
class Summary:
    """What a launch came to, as in summary.json."""

    status: Status
    eval_top1: float
    eval_loss: float
    eval_count: int
    best_top1: float
    epochs: int
    steps: int
    seconds: float
    """Wall-clock seconds of training and evaluation over all launches."""
    images_per_second: float
    """Training only, all ranks: the median over log windows."""
    mfu: float
    """Model FLOPs utilisation: the share of a rank's measured peak that training used at that speed."""
    seconds_per_epoch: float
    world_size: int
    device: str
    backend: str
    sync: str

    def to_json(self) -> str:
        """Return the text of summary.json."""
        renamed = {
            name.replace("eval_", "eval/"): getattr(self, name)
            for name in self.__slots__  # type: ignore[attr-defined]
        }
        return json.dumps(renamed | {"status": self.status.value}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """Return the summary that `to_json` made `text` from."""
        values: dict[str, Any] = {key.replace("eval/", "eval_"): value for key, value in json.loads(text).items()}
        values["status"] = Status(values["status"])
        return cls(**values)

    def line(self) -> str:
        """Return the last line of a launch."""
        where = f"{self.world_size} × {self.device} ({self.backend})"
        speed = f"{self.seconds_per_epoch:,.1f} s/epoch · {self.images_per_second:,.0f} img/s on {where}"
        return f"test acc {self.eval_top1:.4f} · {speed}"
