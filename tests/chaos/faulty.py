"""The command line with one fault: FAULT=what:rank:where[:once], done to that rank.

With what=lost or what=frozen all other ranks get SIGTERM too, and then that rank gets SIGKILL or
SIGSTOP.

`where` is the number of a step, just before which it happens, or ``join``, ``start``,
``evaluation`` or ``save``. With ``once`` it does not happen again after a restart by torchrun.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from ddp_trainer.__main__ import main
from ddp_trainer.async_step import AsyncStep
from ddp_trainer.checkpoint import store as checkpoint
from ddp_trainer.distributed import process_group
from ddp_trainer.pipeline_step import PipelineStep
from ddp_trainer.training import loop
from ddp_trainer.training.step import TrainStep

WHAT, RANK, WHERE, *ONCE = os.environ["FAULT"].split(":")
if ONCE and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    WHERE = "never"
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "lost": signal.SIGKILL,
    "frozen": signal.SIGSTOP,
}
LEAK: list[bytearray] = []
take_step: dict[type[TrainStep], Callable[..., Tensor]] = {
    kind: kind.__call__ for kind in (TrainStep, AsyncStep, PipelineStep)
}


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
                happen()
    return take_step[type(self)](self, images, labels)


def happen() -> None:
    """Send the signal, or touch 8 GB of memory."""
    if WHAT in ("lost", "frozen"):
        terminate_others()
    if WHAT == "memory":
        LEAK.append(bytearray(b"x") * 8_000_000_000)
    else:
        os.kill(os.getpid(), SIGNALS[WHAT])


def terminate_others() -> None:
    """Send SIGTERM to all other ranks, as torchrun does when it sees a loss before they do."""
    agent = os.getppid()
    ranks = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
    for rank in set(ranks) - {os.getpid()}:
        os.kill(rank, signal.SIGTERM)


def wait_for_other_ranks() -> None:
    """Wait until all ranks have imported torch, which on a busy machine may take longer than a
    short timeout.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.add("imported", 1)
        while store.add("imported", 0) < ranks:
            time.sleep(0.05)


def signalled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` preceded by what happens, the first time."""
    waiting = [happen]

    def call(*args: Any, **options: Any) -> Any:
        if os.environ.get("RANK", "0") == RANK and waiting:
            waiting.pop()()
        return function(*args, **options)

    return call


match WHERE:
    case "join":
        process_group._join = signalled(process_group._join)
    case "start":
        loop.prime = signalled(loop.prime)
    case "evaluation":
        loop.evaluate = signalled(loop.evaluate)
    case "save":
        checkpoint.write_file = signalled(checkpoint.write_file)
    case _:
        for kind in take_step:
            kind.__call__ = faulty_step
wait_for_other_ranks()
main()
