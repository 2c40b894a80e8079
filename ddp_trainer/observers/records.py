"""The log records of a run, and the texts around them, for its loggers."""

import json

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import flatten_keys
from ddp_trainer.observers.loggers.base import LoggerGroup
from ddp_trainer.training.run import Observer, TrainingRun
from ddp_trainer.training.summary import Status


class Records(Observer):
    """Passes the values of log points and evaluations to the loggers; the last observer of all."""

    def __init__(self, loggers: LoggerGroup) -> None:
        self.loggers = loggers

    def on_start(self, run: TrainingRun) -> None:
        self.loggers.start(run.step)
        launch = {
            "epoch": run.epoch,
            "launch/world_size": run.world.world_size,
            "launch/steps_per_epoch": run.steps_per_epoch,
        }
        self.loggers.scalars(launch, run.step)
        config = json.dumps(to_builtins(run.config), indent=2)
        self.loggers.text("config", f"```json\n{config}\n```", run.step)

    def on_log(self, run: TrainingRun) -> None:
        self.loggers.scalars(run.values, run.step)

    def on_evaluation(self, run: TrainingRun) -> None:
        self.loggers.scalars(run.values, run.step)

    def on_end(self, run: TrainingRun) -> None:
        loss = run.evaluation.loss
        if run.status is Status.stopped or loss is None:
            return
        results = {"hparam/top1": run.evaluation.top1, "hparam/loss": loss}
        self.loggers.hparams(flatten_keys(to_builtins(run.config)), results)
