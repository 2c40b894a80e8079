"""One training run from a config: builds its parts, owns the run directory, closes everything."""

import json
import logging
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ddp_trainer import registry
from ddp_trainer.checkpoint.file import State
from ddp_trainer.checkpoint.run_dir import check_changes, lock_run_dir
from ddp_trainer.checkpoint.store import CheckpointStore
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import require
from ddp_trainer.config.metrics import MetricConfig
from ddp_trainer.config.observers import ObserverConfig, ReportConfig
from ddp_trainer.config.schema import Config, OnCorruption, Precision, Resume
from ddp_trainer.data.dataset import Datasets, num_samples
from ddp_trainer.distributed.environment import Environment, installed_versions, read_environment
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.world import World
from ddp_trainer.files import exclude_node, replace_text
from ddp_trainer.observers.console import EpochLines, ProgressBar, logging_to
from ddp_trainer.observers.failures.monitor import FailureMonitor
from ddp_trainer.observers.gradient_check import CorruptionError, GradientCheck
from ddp_trainer.observers.loggers.base import Loggers, build_loggers
from ddp_trainer.observers.memory import Memory
from ddp_trainer.observers.pictures import Pictures
from ddp_trainer.observers.ranks import RankTimes
from ddp_trainer.observers.step_times import StepTimer, StepTimes
from ddp_trainer.runtime import disable_gc
from ddp_trainer.start import Start, start
from ddp_trainer.training.control import ControlPoint
from ddp_trainer.training.evaluation import Metric
from ddp_trainer.training.loop import fit
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.run import Events, Observer, TrainingRun
from ddp_trainer.training.summary import Status, Summary

logger = logging.getLogger(__name__)

RESTART_SECONDS = 3.0
"""How long a rank of a job on several nodes waits to end if another rank got the stop request.

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

    Raises:
        ConfigError: the config breaks a rule that depends on this machine, data set or directory.
        TransientError: a condition that may go away, such as another launch in the same directory.
    """
    environment = read_environment()
    run_dir = run_dir or Path(config.output_dir).expanduser() / config.name
    with ExitStack() as stack:
        begun = start(config, environment, stack)
        world = begun.world
        resume = resolve_resume(begun.config.resume, environment, world)
        open_run_dir(run_dir, to_builtins(begun.config), world, resume=resume, stack=stack)
        stop = catch_signals(environment, world, stack)
        training = build_run(begun, run_dir, environment=environment, stop=stop, stack=stack)
        log_header(training, begun.datasets)
        nodes = world.all_gather_object(environment.node)
        try:
            summary = fit(training)
        except CorruptionError as error:
            is_excluded = begun.config.check.on_corruption is OnCorruption.exclude
            if world.is_main and is_excluded and error.rank is not None:
                exclude_node(run_dir, nodes[error.rank])
            raise
        training.enter(Phase.end)  # files and loggers may take as long as they need
        training.checkpoints.wait()
        record_summary(summary, training)
        training.emit("end")
        del training  # no DDP module may outlive the process group
    is_stopped_by_another = summary.status is Status.stopped and not stop.is_set
    if is_stopped_by_another and not environment.is_one_node:
        time.sleep(RESTART_SECONDS)
    return summary


def resolve_resume(resume: Resume, environment: Environment, world: World) -> Resume:
    """Return how this launch resumes: a restarted job also resumes with resume=never. Collective.

    All ranks are asked, because a late node does not know of the restart.
    """
    is_restart = any(world.all_gather_object(environment.is_restart))
    return Resume.auto if is_restart and resume is Resume.never else resume


def catch_signals(environment: Environment, world: World, stack: ExitStack) -> GracefulStop:
    """Return the flag of the graceful stop, whose signal handlers `stack` removes. Collective."""
    stop_file = environment.stop_file if world.local_rank == 0 else None
    under_torchrun = environment.under_torchrun
    return world.raise_on_any_rank(
        lambda: stack.enter_context(GracefulStop(stop_file, under_torchrun=under_torchrun))
    )


def build_run(
    begun: Start, run_dir: Path, *, environment: Environment, stop: GracefulStop, stack: ExitStack
) -> TrainingRun:
    """Return the run with its parts and observers, which `stack` closes. Collective."""
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
    loaders = begun.build_loaders()
    tree = to_builtins(config)

    def check_state(state: State) -> None:
        check_changes(state["config"], tree, run_dir=run_dir)
        require(
            state["data_fingerprint"] == loaders.datasets.fingerprint,
            f"{run_dir} was trained on other images than data={config.data.name} has here: restore "
            "the former images, choose name=… for a new run, or resume=never to start from step 0",
        )

    checkpoints = CheckpointStore(
        run_dir / "checkpoints",
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        world=world,
        check_state=check_state,
    )
    stack.callback(checkpoints.close)
    with disable_gc():  # because DDP imports torch's compiler
        step = begun.build_step()
    every_steps = config.check.every_steps
    if every_steps is not None:
        check = GradientCheck(step, every_steps=every_steps, deterministic=config.deterministic)
        step.hooks.append(check)
    control = ControlPoint(
        world,
        log_every_steps=config.log_every_steps,
        save_every_steps=config.checkpoint.every_steps,
        save_every_seconds=config.checkpoint.every_seconds,
    )
    training = TrainingRun(
        config,
        config_tree=tree,
        train_step=step,
        loaders=loaders,
        checkpoints=checkpoints,
        control=control,
        metrics=build_metrics(config.metric),
        should_stop=stop.poll,
    )
    observers = build_observers(training, monitor, loggers, stack)
    training.events = Events(list(observers.values()), list(observers))
    step.on_phase = training.enter
    monitor.emit_failure = partial(training.emit, "failure")
    return training


def build_metrics(configs: Mapping[str, MetricConfig]) -> dict[str, Metric]:
    """Return the metrics that the config chooses, by name."""
    returns = cast(Any, Callable)
    return {name: registry.build("metric", one, returns=returns) for name, one in configs.items()}


def build_observers(
    training: TrainingRun, monitor: FailureMonitor, loggers: Loggers, stack: ExitStack
) -> dict[str, Observer]:
    """Return all observers by name, in the order in which they are called.

    The project's own observers add values to log records, then those of the config; the last one
    passes the records to the loggers.
    """
    timer = StepTimer(training.world.device, training.model)
    own = dict(training.config.observer)
    if training.config.report:
        own.setdefault("report", ReportConfig())
    bars: dict[str, Observer] = {}
    if ProgressBar.is_wanted(training.world):
        bar = ProgressBar()
        stack.callback(bar.close)
        bars["progress_bar"] = bar
    return {
        "failures": monitor,
        "ranks": RankTimes(timer),
        "step_times": StepTimes(timer),
        "memory": Memory(),
        **bars,
        "epoch_lines": EpochLines(),
        "pictures": Pictures(loggers),
        **build_own_observers(own),
        "loggers": loggers,
    }


def build_own_observers(configs: Mapping[str, ObserverConfig]) -> dict[str, Observer]:
    """Return the observers that the config chooses, by name."""
    return {
        name: registry.build("observer", one, returns=Observer) for name, one in configs.items()
    }


def open_run_dir(
    run_dir: Path, config: dict[str, Any], world: World, *, resume: Resume, stack: ExitStack
) -> None:
    """Create and lock `run_dir`, and log to it, until `stack` closes. Collective."""
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


def log_header(training: TrainingRun, datasets: Datasets) -> None:
    """Log the model, the data, the devices, the batch sizes and the run directory."""
    config = training.config
    world = training.world
    sampler = training.loaders.sampler
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else platform.processor()
    )
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
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
    logger.info("run directory %s", training.run_dir)


def record_summary(summary: Summary, training: TrainingRun) -> None:
    """On rank 0, write summary.json and log it; if stopped, also write the file `STOPPED`."""
    if not training.world.is_main:
        return
    write_output(training.run_dir / "summary.json", summary.to_json())
    if summary.status is Status.stopped:
        write_output(training.run_dir / STOPPED, f"{summary.steps}\n")
        logger.info("stopped at step %d, not finished: the same command resumes it", summary.steps)
        return
    logger.info(summary.line())


def write_output(path: Path, text: str) -> None:
    """Write a file that training does not depend on; a failure only logs a warning."""
    try:
        replace_text(path, text)
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)
