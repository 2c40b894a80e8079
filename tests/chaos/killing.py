"""A plug-in: ``observer=[kills]`` kills ranks at places in the training, at each of them once.

The training is slow as long as a kill is due, so that a rank that has to be killed again has time
to come back.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from ddp_trainer import ObserverConfig, register_observer
from ddp_trainer.config.errors import NAMED, config_class, setting


@config_class
class KillsConfig(ObserverConfig):
    name: str = "kills"
    plan: str = setting("", NAMED)
    """Words ``slot:phase:step:milliseconds``: kill the rank of the slot so many milliseconds after
    it has entered the phase at that step, or at a later one; or has "evaluated", at once.
    """
    folder: str = setting("", NAMED)
    """A folder for a file for each word that was carried out."""


SECONDS = 0.1
"""The time that a step takes at least as long as a kill is due."""

ENDING = threading.Lock()
"""Held by the thread that ends the process, so that a process is ended for one word only."""


@register_observer("kills", KillsConfig)
def build_kills(config: KillsConfig) -> Any:
    # here, because it imports torch, which most processes of a launch do not need
    from ddp_trainer import Observer, TrainingRun
    from ddp_trainer.training.phase import Phase

    kills = [parse(word, Path(config.folder)) for word in config.plan.split()]

    class Kills(Observer):
        def __init__(self) -> None:
            self.plan = [kill for kill in kills if kill.slot == os.environ.get("RANK")]

        def on_phase(self, run: TrainingRun, phase: Phase) -> None:
            for kill in self.plan:
                if kill.is_due(phase.name, run.step):
                    kill.start()

        def on_evaluation(self, run: TrainingRun) -> None:
            for kill in self.plan:
                if kill.is_due("evaluated", run.step):
                    kill.end_process(SECONDS)  # when the others have the result, too

        def on_step(self, run: TrainingRun) -> None:
            if any(kill.step <= run.step and not kill.done.exists() for kill in kills):
                time.sleep(SECONDS)

    return Kills()


class Kill(NamedTuple):
    slot: str
    place: str
    step: int
    seconds: float
    done: Path

    def is_due(self, place: str, step: int) -> bool:
        return self.place == place and self.step <= step and not self.done.exists()

    def start(self) -> None:
        """End the process in time, or at once if there is no delay: a thread may have to wait."""
        if not self.seconds:
            self.end_process()
        threading.Thread(target=self.end_process, args=[self.seconds], daemon=True).start()

    def end_process(self, delay: float = 0) -> None:
        """End the process after `delay` seconds, and create the file `done` right before."""
        time.sleep(delay)
        with ENDING:
            self.done.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


def parse(word: str, folder: Path) -> Kill:
    slot, place, step, milliseconds = word.split(":")
    return Kill(slot, place, int(step), float(milliseconds) / 1000, folder / word)
