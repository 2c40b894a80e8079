"""An observer of your own, which ends the training early: python examples/own_observer.py

On the command line it is a choice of the group observer, which is a list:

    export PYTHONPATH=examples DDP_TRAINER_PLUGINS=own_observer
    NPROC=2 launch/local.sh observer=[stop_below] observer.stop_below.loss=0.5

Every rank has the observer, and calls its methods in the same order. A request to stop is reduced
over all ranks, so that they stop after the same step, evaluate and save.
"""

from dataclasses import dataclass
from typing import Any

from ddp_trainer import Config, Observer, ObserverConfig, TrainingRun, launch, register_observer


@dataclass(kw_only=True, slots=True)
class StopBelowConfig(ObserverConfig):
    name: str = "stop_below"
    loss: float = 1.0
    """The training ends when the mean training loss of a log window is below this number."""
    windows: int = 2
    """Number of log windows in a row whose mean loss must be below `loss`."""


@register_observer("stop_below", StopBelowConfig)
class StopBelow(Observer):
    """Ends the training when the loss is low enough."""

    def __init__(self, config: StopBelowConfig) -> None:
        self.config = config
        self.count = 0

    def on_log(self, run: TrainingRun) -> None:
        loss = float(run.values["train/loss"])
        self.count = self.count + 1 if loss < self.config.loss else 0
        if self.count == self.config.windows:
            run.request_stop(f"the loss {loss:.4f} is below {self.config.loss}")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


if __name__ == "__main__":
    config = Config(
        model="lenet",
        observer={"stop_below": {"loss": 1.5}},
        epochs=50,
        name="own_observer",
    )
    summary = launch(config, num_ranks=2)
    print(f"{summary.status} after {summary.steps} steps: {summary.stop_reason}")
