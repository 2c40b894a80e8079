"""A plug-in: ``observer=[kills]`` kills ranks at places in the training, at each of them once.

The training is slow as long as a kill is due, so that a rank that has to be killed again has time
to come back.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from ddp_trainer import ObserverConfig, register_observer
from ddp_trainer.config.errors import NAMED, config_class, setting


@config_class
class KillsConfig(ObserverConfig):
    name: str = "kills"
    plan: str = setting("", NAMED)
    """Words ``slot:phase:step:milliseconds``: kill the rank of the slot so many milliseconds after
    it has entered the phase at that step, or at a later one.
    """
    folder: str = setting("", NAMED)
    """A folder for a file for each word that was carried out."""


SECONDS = 0.1
"""The time that a step takes at least as long as a kill is due."""


@register_observer("kills", KillsConfig)
def build_kills(config: KillsConfig) -> Any:
    # here, because it imports torch, which most processes of a launch do not need
    from ddp_trainer import Observer, TrainingRun
    from ddp_trainer.training.phase import Phase

    class Kills(Observer):
        def __init__(self) -> None:
            self.folder = Path(config.folder)
            words = [word.split(":") for word in config.plan.split()]
            self.steps = {":".join(word): int(word[2]) for word in words}
            self.plan = [
                (":".join(word), phase, int(step), float(delay) / 1000)
                for word in words
                for slot, phase, step, delay in [word]
                if slot == os.environ.get("RANK")
            ]

        def on_phase(self, run: TrainingRun, phase: Phase) -> None:
            for word, name, step, delay in self.plan:
                if name == phase.name and run.step >= step and self.is_first(word):
                    threading.Thread(target=end_after, args=[delay], daemon=True).start()

        def on_step(self, run: TrainingRun) -> None:
            due = [word for word, step in self.steps.items() if step <= run.step]
            if not all((self.folder / word).exists() for word in due):
                time.sleep(SECONDS)

        def is_first(self, word: str) -> bool:
            try:
                (self.folder / word).touch(exist_ok=False)
            except FileExistsError:
                return False
            return True

    return Kills()


def end_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
