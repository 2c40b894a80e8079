"""One training run from a config: builds its parts, owns the run directory, and closes everything
again.
"""

import json
import logging
import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from ddp_trainer import registry
from ddp_trainer.checkpoint.run_dir import lock_run_dir
from ddp_trainer.checkpoint.store import CheckpointStore
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import flatten_keys
from ddp_trainer.config.schema import Config, OnCorruption, Precision, Resume
from ddp_trainer.data.dataset import Datasets, num_samples
from ddp_trainer.distributed.environment import Environment, installed_versions, read_environment
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.process_group import World
from ddp_trainer.distributed.seeding import derive_seed
from ddp_trainer.files import exclude_node, replace_text
from ddp_trainer.models import build_model
from ddp_trainer.observers.console import logging_to
from ddp_trainer.observers.failures.monitor import FailureMonitor
from ddp_trainer.observers.log_window import LogWindow
from ddp_trainer.observers.loggers.base import build_loggers
from ddp_trainer.observers.step_timer import StepTimer
from ddp_trainer.runtime import disable_gc
from ddp_trainer.start import Start, start
from ddp_trainer.sync import build_sync
from ddp_trainer.tools.final_report import write_final_report
from ddp_trainer.training.control import ControlPoint
from ddp_trainer.training.gradient_check import CorruptionError, GradientCheck
from ddp_trainer.training.optimizers import build_optimizer
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.schedulers import lr_factor
from ddp_trainer.training.step import StepSettings, TrainStep
from ddp_trainer.training.summary import Status, Summary
from ddp_trainer.training.trainer import Trainer

logger = logging.getLogger(__name__)

RESTART_SECONDS = 3.0
"""How long a rank of a job on several nodes waits before it ends, if only another rank got the
request to stop.

torchrun stops all ranks of an elastic job when a node comes back, and starts them again. If the
torchrun process of a node sees its ranks end before it has noticed the new node, it considers the
job finished and does not restart them.
"""
STOPPED = "stopped"
"""The name of a file in the run directory: the run was stopped gracefully and is not finished."""


def run(config: Config, run_dir: Path | None = None) -> Summary:
    """Train as `config` says, in `run_dir`, and return the result. Every rank calls this.

    `run_dir` is ``<output_dir>/<name>`` unless given. Resumes from the newest checkpoint in
    `run_dir`, if there is one.

    Raises ConfigError if the config breaks a rule that depends on this machine, data set or
    directory; TransientError for a condition that may go away, such as another launch in the same
    directory.
    """
    environment = read_environment()
    run_dir = run_dir or Path(config.output_dir).expanduser() / config.name
    with ExitStack() as stack:
        begun = start(config, environment, stack)
        config = begun.config
        world = begun.world
        # A restarted job resumes even with resume=never. All ranks are asked: a late node does not
        # know of the restart.
        is_restart = any(world.all_gather_object(environment.is_restart))
        resume = Resume.auto if is_restart and config.resume is Resume.never else config.resume
        open_run_dir(run_dir, to_builtins(config), world, resume=resume, stack=stack)
        stop_file = environment.stop_file if world.local_rank == 0 else None
        stop = world.raise_on_any_rank(
            lambda: stack.enter_context(
                GracefulStop(stop_file, under_torchrun=environment.under_torchrun)
            )
        )
        trainer = build_trainer(begun, run_dir, environment=environment, stop=stop, stack=stack)
        log_header(trainer, begun.datasets)
        nodes = world.all_gather_object(environment.node)
        try:
            summary = trainer.fit()
        except CorruptionError as error:
            if (
                world.is_main
                and config.check.on_corruption is OnCorruption.exclude
                and error.rank is not None
            ):
                exclude_node(run_dir, nodes[error.rank])
            raise
        trainer.monitor.on_phase(
            trainer, Phase.end
        )  # files and loggers may take as long as they need
        trainer.checkpoints.wait()
        record_summary(summary, trainer)
        write_final_report(trainer, begun.datasets)
        del trainer  # no DDP module may outlive the process group
    is_stopped_by_another = summary.status is Status.stopped and not stop.is_set
    if is_stopped_by_another and environment.world_size > environment.local_world_size:
        time.sleep(RESTART_SECONDS)
    return summary


def build_trainer(
    begun: Start, run_dir: Path, *, environment: Environment, stop: GracefulStop, stack: ExitStack
) -> Trainer:
    """Return the trainer of run `begun`; `stack` closes failure monitor, loggers and checkpoint
    store. Collective.
    """
    config = begun.config
    world = begun.world
    monitor = stack.enter_context(
        FailureMonitor(
            world, environment, stop, run_dir=run_dir, timeout_seconds=config.timeout_seconds
        )
    )
    own_loggers = config.logger.values() if world.is_main else ()
    loggers = stack.enter_context(
        world.raise_on_any_rank(lambda: build_loggers(own_loggers, run_dir))
    )
    checkpoints = CheckpointStore(run_dir / "checkpoints", config.checkpoint, world=world)
    stack.callback(checkpoints.close)
    loaders = begun.build_loaders()
    with disable_gc():  # because DDP imports torch's compiler
        timer, step = build_step(begun, lambda phase: monitor.on_phase(None, Phase(phase)))
    control = ControlPoint(
        world,
        log_every_steps=config.log_every_steps,
        checkpoint=config.checkpoint,
        should_stop=stop.poll,
    )
    window = LogWindow(
        step, timer, loaders, log_every_steps=config.log_every_steps, run_dir=run_dir
    )
    monitor.emit_failure = window.reports.recorder.write
    return Trainer(
        config,
        step=step,
        window=window,
        loaders=loaders,
        checkpoints=checkpoints,
        loggers=loggers,
        control=control,
        monitor=monitor,
    )


def open_run_dir(
    run_dir: Path, config: dict[str, Any], world: World, *, resume: Resume, stack: ExitStack
) -> None:
    """Create and lock `run_dir` on rank 0, and write log messages to it, both until `stack` closes.
    Collective.
    """
    lock = lock_run_dir(run_dir, config, resume=resume)
    backup_dir = world.raise_on_any_rank(
        lambda: stack.enter_context(lock) if world.is_main else None
    )
    stack.enter_context(logging_to(run_dir, rank=world.rank))
    if backup_dir is not None:
        logger.info("resume=never: renamed the former run to %s", backup_dir)
    if world.is_main:
        (run_dir / STOPPED).unlink(missing_ok=True)
        versions = installed_versions() | registry.plugin_versions()
        write_output(run_dir / "versions.json", json.dumps(versions, indent=2) + "\n")


def build_step(
    begun: Start, on_phase: Callable[[str], None] = lambda phase: None
) -> tuple[StepTimer, TrainStep]:
    """Build and return the step timer and the training step. on_phase: called with the name of each
    phase of a step.
    """
    config = begun.config
    world = begun.world
    datasets = begun.datasets
    torch.manual_seed(derive_seed(config.seed, purpose="model"))
    model = world.raise_on_any_rank(  # the weights file may be missing on some nodes
        lambda: build_model(
            config.model, image_shape=datasets.image_shape, num_classes=len(datasets.class_names)
        )
    )
    model.to(world.device).to(memory_format=begun.memory_format)
    if config.compile:
        # in place and before DDP, so that DDP's hooks stay outside of the graph
        model.compile(dynamic=False)
    optimizer = build_optimizer(
        config.optimizer, model.parameters(), global_batch_size=config.global_batch_size
    )
    steps_per_epoch = num_samples(datasets.train) // config.global_batch_size
    factor = lr_factor(
        config.scheduler,
        steps_per_epoch=steps_per_epoch,
        total_steps=steps_per_epoch * config.epochs,
    )
    timer = StepTimer(world.device, model)

    def enter(phase: str) -> None:
        on_phase(phase)
        timer.enter(phase)

    step = TrainStep(
        model,
        build_sync(config.sync, world),
        optimizer,
        LambdaLR(optimizer, factor),
        settings=StepSettings(
            **{name: getattr(config, name) for name in StepSettings.__dataclass_fields__}
        ),
        world=world,
        on_phase=enter,
    )
    if config.check.every_steps is not None:
        step.check = GradientCheck(
            step, every_steps=config.check.every_steps, deterministic=config.deterministic
        )
    return timer, step


def log_header(trainer: Trainer, datasets: Datasets) -> None:
    """Log the model, the data, the devices, the batch sizes and the run directory."""
    config = trainer.config
    world = trainer.world
    sampler = trainer.loaders.sampler
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else platform.processor()
    )
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    split = config.data.eval_split
    logger.info(
        "%s (%s parameters) on %s: %d training, %d %s images",
        config.model.name,
        f"{parameters:,}",
        config.data.name,
        num_samples(datasets.train),
        num_samples(datasets.eval),
        split,
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
        "global batch %d on %d ranks, at most %d images at a time × %d gradient accumulation steps,"
        " %d steps an epoch, %d epochs, lr %g",
        config.global_batch_size,
        world.world_size,
        -(-sampler.local_batch_size // config.gradient_accumulation_steps),
        config.gradient_accumulation_steps,
        sampler.steps_per_epoch,
        config.epochs,
        config.optimizer.scaled_lr(config.global_batch_size),
    )
    if config.precision is Precision.fp16 and world.device.type == "cpu":
        logger.warning(
            "precision=fp16 takes many times as long as fp32 on a CPU: use precision=fp32"
        )
    if config.checkpoint.keep_best and split == "test":
        logger.info(
            "best.pt is chosen on the test split: set data.validation_fraction=0.1 to hold out"
            " images for it"
        )
    logger.info("run directory %s", trainer.run_dir)


def record_summary(summary: Summary, trainer: Trainer) -> None:
    """On rank 0, write summary.json and log it. If stopped, write the file `STOPPED`; else give
    loggers the scores.
    """
    if not trainer.world.is_main:
        return
    write_output(trainer.run_dir / "summary.json", summary.to_json())
    if summary.status is Status.stopped:
        write_output(trainer.run_dir / STOPPED, f"{summary.steps}\n")
        logger.info("stopped at step %d, not finished: the same command resumes it", summary.steps)
        return
    if summary.eval_loss is not None:
        results = {"hparam/top1": summary.eval_top1, "hparam/loss": summary.eval_loss}
        trainer.loggers.hparams(flatten_keys(to_builtins(trainer.config)), results)
    logger.info(summary.line())


def write_output(path: Path, text: str) -> None:
    """Write a file that training does not depend on; a failure, such as a full disk, only logs a
    warning.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)
