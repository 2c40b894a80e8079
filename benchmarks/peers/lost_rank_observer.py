"""A plug-in of ddp_trainer, ``observer=[lines]``: the line of each step, for `lost_rank.py`."""

import os
from pathlib import Path

from lost_rank_job import log_step

from ddp_trainer import Observer, ObserverConfig, register_observer
from ddp_trainer.config.errors import config_class
from ddp_trainer.training.run import TrainingRun


@config_class
class LinesConfig(ObserverConfig):
    name: str = "lines"


class Lines(Observer):
    def __init__(self, config: LinesConfig) -> None:
        self.folder = Path(os.environ["FOLDER"])

    def on_step(self, run: TrainingRun) -> None:
        assert run.batch is not None
        log_step(self.folder, int(os.environ["RANK"]), run.step, run.batch.ids.tolist())


register_observer("lines", LinesConfig, Lines)
