"""A trainer on trial: it takes steps to be measured, and neither writes nor saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.config import Config
from ddp_trainer.data import Splits
from ddp_trainer.distributed import World
from ddp_trainer.environment import Environment
from ddp_trainer.interrupt import SoftStop
from ddp_trainer.run import build_trainer
from ddp_trainer.trainer import Trainer
from ddp_trainer.watch import Watch
from ddp_trainer.writer import Writer

Build = Callable[[Config, World], Trainer]


def builder(stack: ExitStack, *, splits: Splits, folder: Path, environment: Environment) -> Build:
    """Return a function that builds a trainer which neither writes nor saves."""

    def build(config: Config, world: World) -> Trainer:
        checkpoints = stack.enter_context(Checkpoints(folder, config.checkpoint, world=world, resume=config.resume))
        writer = Writer(folder, enabled=False, console=Console(), config={})
        stop = SoftStop(None)
        watch = Watch(world, environment, run_dir=folder, timeout_seconds=config.timeout_seconds)
        return build_trainer(
            config, world=world, splits=splits, checkpoints=checkpoints, writer=writer, watch=watch, stop=stop
        )

    return build


def take_steps(trainer: Trainer, steps: int) -> dict[str, float]:
    """Take optimizer steps as an epoch would, but without log points. Return the timeline's tags."""
    trainer.model.train()
    trainer.timeline.restart()
    batches = endless(trainer)
    for _ in range(steps):
        batch = next(batches)
        trainer.train_step(batch.images, batch.labels)
        trainer.progress.step += 1
    trainer.enter("gradient sync")
    trainer.sync.settle(trainer.optimizer)
    return trainer.timeline.close_window(trainer.config.global_batch_size)


def endless(trainer: Trainer) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    while True:
        epoch, start = divmod(trainer.step, trainer.steps_per_epoch)
        trainer.loader.sampler.set_epoch(epoch, start)
        yield from trainer.timeline.timed(trainer.loader)
