"""One training run from a config: builds everything, owns the run directory, closes it all again."""

from __future__ import annotations

import logging
import platform
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.composition import to_builtins
from ddp_trainer.config import Config
from ddp_trainer.data import (
    Augmentation,
    EvaluationLoader,
    GlobalBatchSampler,
    ResidentLoader,
    Splits,
)
from ddp_trainer.data.loader import Normalise
from ddp_trainer.distributed import World
from ddp_trainer.environment import read_environment
from ddp_trainer.interrupt import SoftStop
from ddp_trainer.log import logging_to
from ddp_trainer.memory import without_collection
from ddp_trainer.models import build_model
from ddp_trainer.optim import build_optimizer, build_scheduler
from ddp_trainer.run_dir import claimed
from ddp_trainer.seeding import derive_seed
from ddp_trainer.start import start
from ddp_trainer.summary import Status, Summary
from ddp_trainer.sync import build_sync
from ddp_trainer.trainer import Trainer
from ddp_trainer.watch import Watch
from ddp_trainer.writer import Writer

logger = logging.getLogger(__name__)

STOPPED = "stopped"
"""The file that says: ended softly and saved, but not finished."""


def run(config: Config, run_dir: Path | None = None) -> Summary:
    """Train as `config` says, in `run_dir`, and return what it came to. Every rank calls this.

    `run_dir` is ``<output_dir>/<name>`` unless given. What a crash or a stop left there is gone on with.

    Raises:
        ConfigError: the config breaks a rule that only this machine, data set or directory could show.
    """
    environment = read_environment()
    run_dir = run_dir or Path(config.output_dir).expanduser() / config.name
    with ExitStack() as stack:
        config, world, splits = start(config, environment, stack)
        aside = world.together(lambda: stack.enter_context(claimed(run_dir, config)) if world.is_main else None)
        console = Console()
        stack.enter_context(logging_to(console, rank=world.rank, run_dir=run_dir))
        if aside is not None:
            logger.info("resume=never: the former run is now %s", aside)
        stop_file = Path(environment.stop_file) if environment.stop_file and world.local_rank == 0 else None
        stop = stack.enter_context(SoftStop(stop_file))
        watch = stack.enter_context(
            Watch(
                world,
                environment,
                run_dir=run_dir,
                timeout_seconds=config.timeout_seconds,
                told_to_stop=lambda: stop.is_set,
            )
        )
        writer = stack.enter_context(
            Writer(run_dir, enabled=world.is_main, console=console, config=to_builtins(config))
        )
        writer.remove(STOPPED)
        checkpoints = stack.enter_context(
            Checkpoints(run_dir / "checkpoints", config.checkpoint, world=world, resume=config.resume)
        )
        with without_collection():  # DDP imports the compiler
            trainer = build_trainer(
                config, world=world, splits=splits, checkpoints=checkpoints, writer=writer, watch=watch, stop=stop
            )
        print_header(config, trainer, splits, run_dir)
        summary = trainer.fit()
        checkpoints.wait()
        tell(summary, writer)
        del trainer  # no DDP module may outlive the process group
    return summary


def build_trainer(
    config: Config,
    *,
    world: World,
    splits: Splits,
    checkpoints: Checkpoints,
    writer: Writer,
    watch: Watch,
    stop: SoftStop,
) -> Trainer:
    """Build the model, its strategy, optimizer and data, and the trainer that holds them."""
    channels, height, width = splits.train.images.shape[1:]
    torch.manual_seed(derive_seed(config.seed, purpose="model"))
    model = build_model(config.model, image_shape=(channels, height, width), num_classes=splits.num_classes).to(
        world.device
    )
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    model.to(memory_format=memory_format)
    if config.compile:
        model.compile(dynamic=False)  # in place and before DDP, so that DDP's hooks stay outside of the graph
    sync = build_sync(config.sync, world)
    replica = sync.wrap(model)
    loaders = build_loaders(config, world=world, splits=splits, memory_format=memory_format)
    optimizer = build_optimizer(config.optimizer, model.parameters(), global_batch_size=config.global_batch_size)
    steps = loaders[0].sampler.steps_per_epoch
    return Trainer(
        config,
        world=world,
        model=model,
        replica=replica,
        sync=sync,
        optimizer=optimizer,
        scheduler=build_scheduler(
            config.scheduler, optimizer, steps_per_epoch=steps, total_steps=steps * config.epochs
        ),
        loader=loaders[0],
        eval_loader=loaders[1],
        checkpoints=checkpoints,
        writer=writer,
        watch=watch,
        should_stop=stop.poll,
    )


def build_loaders(
    config: Config, *, world: World, splits: Splits, memory_format: torch.memory_format
) -> tuple[ResidentLoader, EvaluationLoader]:
    """Build what training and evaluation iterate over."""
    height, width = splits.train.images.shape[2:]
    normalise = Normalise(config.data.mean, config.data.std, device=world.device, memory_format=memory_format)
    sampler = GlobalBatchSampler(
        splits.train.labels,
        global_batch_size=config.global_batch_size,
        num_replicas=world.world_size,
        rank=world.rank,
        seed=config.seed,
    )
    train = ResidentLoader(
        splits.train,
        sampler=sampler,
        augmentation=Augmentation(config.data.augment, height=height, width=width, seed=config.seed),
        normalise=normalise,
        device=world.device,
    )
    evaluation = EvaluationLoader(
        splits.eval,
        batch_size=config.eval_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        normalise=normalise,
        device=world.device,
    )
    return train, evaluation


def print_header(config: Config, trainer: Trainer, splits: Splits, run_dir: Path) -> None:
    """Say once what runs where, the batch arithmetic and the run directory."""
    world, sampler = trainer.world, trainer.loader.sampler
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    logger.info(
        "%s (%s parameters) on %s: %d training, %d test images",
        config.model.name,
        f"{parameters:,}",
        config.data.name,
        len(splits.train),
        len(splits.eval),
    )
    logger.info(
        "%d × %s (%s), %s, num_threads=%d, sync=%s, torch %s",
        world.world_size,
        device or world.device.type,
        world.backend,
        config.precision.name,
        world.num_threads,
        config.sync.name,
        torch.__version__,
    )
    logger.info(
        "global batch %d = %d ranks × %d × %d microbatches, %d steps an epoch, %d epochs, lr %g",
        config.global_batch_size,
        world.world_size,
        -(-sampler.local_batch_size // config.num_microbatches),
        config.num_microbatches,
        sampler.steps_per_epoch,
        config.epochs,
        config.optimizer.scaled_lr(config.global_batch_size),
    )
    logger.info("run directory %s", run_dir)


def tell(summary: Summary, writer: Writer) -> None:
    """Write summary.json, a marker if the launch was stopped, and the final line."""
    writer.file("summary.json", summary.to_json())
    if summary.status is Status.stopped:
        writer.file(STOPPED, f"{summary.steps}\n")
        logger.info("stopped at step %d, not finished: the same command goes on", summary.steps)
        return
    writer.hparams({"hparam/top1": summary.eval_top1, "hparam/loss": summary.eval_loss})
    logger.info(summary.line())
