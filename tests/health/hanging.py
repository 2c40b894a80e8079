"""The command line, with the main thread of one rank stuck: STUCK=rank:where:step, where is a key
of PLACES.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

from ddp_trainer.__main__ import main
from ddp_trainer.distributed.environment import end_with_launcher

end_with_launcher()  # before torch is imported, which takes a while

from ddp_trainer.checkpoint import store  # noqa: E402
from ddp_trainer.data.loaders import TrainLoader  # noqa: E402
from ddp_trainer.models.lenet import LeNet  # noqa: E402
from ddp_trainer.observers.loggers.jsonl import JsonlLogger  # noqa: E402
from ddp_trainer.training import loop  # noqa: E402
from ddp_trainer.training.control import ControlPoint  # noqa: E402

RANK, WHERE, COUNT = os.environ["STUCK"].split(":")
PLACES: dict[str, tuple[Any, str]] = {
    "loader": (TrainLoader, "augment"),
    "forward": (LeNet, "forward"),
    "collective": (ControlPoint, "reduce"),
    "evaluation": (loop, "mean_over_ranks"),
    "save": (store.CheckpointStore, "save"),
    "logger": (JsonlLogger, "scalars"),
}


def stuck_here() -> None:
    threading.Event().wait()


def stuck_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which is stuck in its call of that number, on one rank."""
    count = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if os.environ["RANK"] == RANK and count == calls:
            stuck_here()
        return function(*args, **options)

    return call


owner, name = PLACES[WHERE]
setattr(owner, name, stuck_after(int(COUNT), getattr(owner, name)))
main()
