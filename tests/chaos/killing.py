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


@register_observer("kills", KillsConfig)
def build_kills(config: KillsConfig) -> Any:
    # here, because it imports torch, which most processes of a launch do not need
    from ddp_trainer import Observer, TrainingRun
    from ddp_trainer.training.phase import Phase

    class Kills(Observer):
        def __init__(self) -> None:
            self.folder = Path(config.folder)
            kills = list(map(parse, config.plan.split()))
            self.steps = {kill.word: kill.step for kill in kills}
            self.plan = [kill for kill in kills if kill.slot == os.environ.get("RANK")]

        def delays(self, run: TrainingRun, place: str) -> list[float]:
            return [
                kill.seconds
                for kill in self.plan
                if kill.place == place
                and run.step >= kill.step
                and is_first(self.folder / kill.word)
            ]

        def on_phase(self, run: TrainingRun, phase: Phase) -> None:
            for delay in self.delays(run, phase.name):
                if not delay:
                    end_after(0)  # before another thread, which may have to wait for a core, would
                threading.Thread(target=end_after, args=[delay], daemon=True).start()

        def on_evaluation(self, run: TrainingRun) -> None:
            if self.delays(run, "evaluated"):
                end_after(SECONDS)  # when the others have the result, too

        def on_step(self, run: TrainingRun) -> None:
            due = [word for word, step in self.steps.items() if step <= run.step]
            if not all((self.folder / word).exists() for word in due):
                time.sleep(SECONDS)

    return Kills()


def is_first(path: Path) -> bool:
    """Create a file, and return whether it did not exist."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Kill(NamedTuple):
    word: str
    slot: str
    place: str
    step: int
    seconds: float


def parse(word: str) -> Kill:
    slot, place, step, milliseconds = word.split(":")
    return Kill(word, slot, place, int(step), float(milliseconds) / 1000)


def end_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
