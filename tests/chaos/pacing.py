"""A plug-in: ``observer=[pace]`` slows a training down. It then leaves the cores to others, and is
not over before a test has seen the event it waits for.
"""

import time
from pathlib import Path
from typing import Any

from ddp_trainer import ObserverConfig, register_observer
from ddp_trainer.config.errors import NAMED, config_class, setting

SECONDS = 0.1
"""The time that a step takes at least."""


@config_class
class PaceConfig(ObserverConfig):
    name: str = "pace"
    file: str = setting("", NAMED)
    """The training is slow as long as this file exists; without a name it is always slow."""


@register_observer("pace", PaceConfig)
def build_pace(config: PaceConfig) -> Any:
    # here, because it imports torch, which most processes of a launch do not need
    from ddp_trainer import Observer, TrainingRun

    class Pace(Observer):
        file = Path(config.file or "/")

        def on_step(self, run: TrainingRun) -> None:
            if self.file.exists():
                time.sleep(SECONDS)

    return Pace()
