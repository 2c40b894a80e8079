"""One training run from a config: builds everything, owns the run directory, closes it all again."""

from __future__ import annotations

import logging
import platform
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from ddp_trainer.checkpoint import Checkpoints
from ddp_trainer.composition import digest, to_builtins
from ddp_trainer.config import Config, ConfigError, Precision, flatten, require
from ddp_trainer.data import (
    Augmentation,
    EvaluationLoader,
    GlobalBatchSampler,
    ResidentLoader,
    Splits,
    load_splits,
    prepare,
)
from ddp_trainer.data.loader import Normalise
from ddp_trainer.distributed import World, connected
from ddp_trainer.environment import read_environment
from ddp_trainer.interrupt import SoftStop
from ddp_trainer.log import logging_to
from ddp_trainer.models import build_model
from ddp_trainer.optim import build_optimizer, build_scheduler
from ddp_trainer.rollcall import versions
from ddp_trainer.run_dir import claimed
from ddp_trainer.seeding import derive_seed
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
    refusal = prepare_data(config)
    with ExitStack() as stack:
        world = stack.enter_context(connected(config, environment))
        check_same_start(config, world)
        config = settle(config, world)
        splits = world.together(lambda: load(config, world, refusal))
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
        trainer = build_trainer(
            config, world=world, splits=splits, checkpoints=checkpoints, writer=writer, watch=watch, stop=stop
        )
        print_header(config, trainer, splits, run_dir)
        summary = trainer.fit()
        checkpoints.wait()
        tell(summary, writer)
    return summary


def prepare_data(config: Config) -> ConfigError | None:
    """Download what is missing before ranks begin to wait for each other. Return the refusal, to be raised by all."""
    try:
        prepare(config.data)
    except ConfigError as error:
        return error
    return None


def check_same_start(config: Config, world: World) -> None:
    """Refuse to train when ranks were started with different versions or configs. Collective.

    Raises:
        ConfigError: names what differs.
    """
    starts = world.gather({"config": digest(config), **versions()})
    for rank, start in enumerate(starts):
        differ = [
            f"{name} {start[name]} and rank 0 {starts[0][name]}"
            for name in versions()
            if start[name] != starts[0][name]
        ]
        require(not differ, f"rank {rank} has {', '.join(differ)}: install the same on all nodes")
    if all(start == starts[0] for start in starts):
        return
    flats = world.gather(flatten(to_builtins(config)))
    for rank, flat in enumerate(flats):
        keys = [f"{key}: {flats[0].get(key)} → {flat.get(key)}" for key in flat if flat[key] != flats[0].get(key)]
        require(not keys, f"rank {rank} was started with another config ({'; '.join(keys)}): use one command line")


def settle(config: Config, world: World) -> Config:
    """Replace auto by what it means on this hardware, and set torch's global switches."""
    if config.precision is Precision.auto:
        fast = has_fast_bf16(world.device)
        config = replace(config, precision=Precision.bf16 if fast else Precision.fp32)
    config = replace(config, channels_last=config.channels_last in ("auto", True))
    torch.use_deterministic_algorithms(config.deterministic)
    torch.backends.cudnn.benchmark = not config.deterministic
    return config


def has_fast_bf16(device: torch.device) -> bool:
    """Say whether `device` has instructions that multiply bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def load(config: Config, world: World, refusal: ConfigError | None) -> Splits:
    """Read the data and check the batch arithmetic against it."""
    if refusal is not None:
        raise refusal
    splits = load_splits(config.data, seed=config.seed)
    require(len(splits.eval) > 0, f"data={config.data.name} has no evaluation samples: top-1 of none is undefined")
    config.check_world_size(world.world_size)
    GlobalBatchSampler(
        splits.train.labels,
        global_batch_size=config.global_batch_size,
        num_replicas=world.world_size,
        rank=world.rank,
    )
    return splits


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
        model.compile()  # in place and before DDP, so that DDP's hooks stay outside of the graph
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
        "%d × %s (%s), %s, %d threads a rank, sync=%s, torch %s",
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
