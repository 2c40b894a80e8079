"""A plug-in: ``observer=[pace]`` slows a training down. It then leaves the cores to others, and is
not over before a test has seen the event it waits for.
"""

import time
from pathlib import Path

from ddp_trainer import Observer, ObserverConfig, register_observer
from ddp_trainer.config.errors import NAMED, config_class, setting
from ddp_trainer.training.run import TrainingRun

SECONDS = 0.1
"""The time that a step takes at least."""


@config_class
class PaceConfig(ObserverConfig):
    name: str = "pace"
    file: str = setting("", NAMED)
    """The training is slow as long as this file exists; without a name it is always slow."""


class Pace(Observer):
    def __init__(self, config: PaceConfig) -> None:
        self.file = Path(config.file or "/")

    def on_step(self, run: TrainingRun) -> None:
        if self.file.exists():
            time.sleep(SECONDS)


register_observer("pace", PaceConfig, Pace)
