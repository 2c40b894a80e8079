"""Ends a training that no longer improves."""

import math
from typing import Any

from ddp_trainer.config.observers import EarlyStoppingConfig
from ddp_trainer.training.run import Observer, TrainingRun


class EarlyStopping(Observer):
    """Requests a stop after `patience` epochs in a row without an improvement.

    An evaluation within an epoch, for example after a graceful stop, does not count, so that a
    resumed training ends after the same epoch.
    """

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.best_epoch = 0
        self.fruitless = 0
        """Number of epochs since the last improvement."""

    def on_evaluation(self, run: TrainingRun) -> None:
        name = self.config.monitor or run.config.select_by
        if run.step % run.steps_per_epoch:
            return
        value = float(run.values[name])
        sign = 1 if run.config.is_higher_better(name) else -1
        is_better = self.best is None or sign * (value - self.best) > self.config.min_delta
        if is_better and math.isfinite(value):  # AUROC is NaN if there is only one class
            self.best = value
            self.best_epoch = run.epoch + 1
            self.fruitless = 0
            return
        self.fruitless += 1
        if self.fruitless >= self.config.patience:
            best = "" if self.best is None else f" ({self.best:.4f})"
            run.request_stop(f"{name} has not improved since epoch {self.best_epoch}{best}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_epoch": self.best_epoch, "fruitless": self.fruitless}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.best_epoch = state["best_epoch"]
        self.fruitless = state["fruitless"]
