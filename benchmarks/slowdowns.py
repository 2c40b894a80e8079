"""A plug-in that slows one rank down while training: the file SLOWDOWN holds ``phase rank seconds``
or ``none``.

The times by which ranks are compared are written to blocks.jsonl beside it, so that other constants
can be tried.
"""

import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.data.loaders import Batch, TrainLoader
from ddp_trainer.observers.ranks import StragglerFinder
from ddp_trainer.training.step import TrainStep

SIZE = 64
with Path(os.environ["SLOWDOWN"]).open("r+b") as file:
    control = mmap.mmap(file.fileno(), 2 * SIZE)  # then the number of steps that rank 0 has taken


def wait_in(phase: str) -> None:
    """Wait if this rank is to be slow in `phase`."""
    words = control[:SIZE].split()
    if (
        words[0] != b"none"
        and words[0].decode() == phase
        and int(words[1]) == int(os.environ["RANK"])
    ):
        time.sleep(float(words[2]))


class SlowBackward(torch.autograd.Function):
    """The identity, slow in backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wait_in("backward")
        return gradients


take_step = TrainStep.__call__
loss_of = TrainStep.compute_loss
batches_of = TrainLoader.__iter__
add_times = StragglerFinder.add


def counted_step(self: TrainStep, images: Tensor, labels: Tensor) -> Tensor:
    if os.environ["RANK"] == "0":
        control[SIZE:] = f"{self.count:<{SIZE}}".encode()
    return take_step(self, images, labels)


def slow_loss(self: TrainStep, *inputs: Any) -> Any:
    wait_in("forward")
    loss, *others = loss_of(self, *inputs)
    return SlowBackward.apply(loss), *others


def slow_batches(self: TrainLoader) -> Iterator[Batch]:
    for batch in batches_of(self):
        wait_in("data")
        yield batch


def recorded_add(self: StragglerFinder, seconds: Tensor, *, begin: int) -> None:
    add_times(self, seconds, begin=begin)
    with Path(os.environ["SLOWDOWN"]).with_name("blocks.jsonl").open("a") as file:
        file.write(json.dumps([begin, seconds.tolist()]) + "\n")


TrainStep.__call__ = counted_step  # type: ignore[method-assign]
TrainStep.compute_loss = slow_loss  # type: ignore[method-assign]
TrainLoader.__iter__ = slow_batches
StragglerFinder.add = recorded_add  # type: ignore
