"""The command line with one fault: FAULT=what:rank:where, done to that rank.

`where` is the number of a step, just before which it happens, or ``start``, ``evaluation`` or ``save``.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.__main__ import main
from ddp_trainer.checkpoint import store as checkpoint
from ddp_trainer.training.step import TrainStep
from ddp_trainer.training.trainer import Trainer

WHAT, RANK, WHERE = os.environ["FAULT"].split(":")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
take_step = TrainStep.__call__


def faulty_step(self: TrainStep, images: Tensor, labels: Tensor) -> Tensor:
    if self.world.rank == int(RANK) and str(self.count) == WHERE:
        match WHAT:
            case "raise":
                raise RuntimeError("boom in the worker")
            case "nan":
                images = images * float("nan")
            case "flip":
                with torch.no_grad():
                    bits = next(self.model.parameters()).view(-1).view(torch.int32)
                    bits[3] ^= 1 << 12
            case _:
                os.kill(os.getpid(), SIGNALS[WHAT])
    return take_step(self, images, labels)


def signalled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the signal sent just before it, the first time."""
    waiting = [SIGNALS[WHAT]]

    def call(*args: Any, **options: Any) -> Any:
        if os.environ.get("RANK", "0") == RANK and waiting:
            os.kill(os.getpid(), waiting.pop())
        return function(*args, **options)

    return call


match WHERE:
    case "start":
        Trainer.prime = signalled(Trainer.prime)
    case "evaluation":
        Trainer.evaluate = signalled(Trainer.evaluate)
    case "save":
        checkpoint.write_file = signalled(checkpoint.write_file)
    case _:
        TrainStep.__call__ = faulty_step
main()
