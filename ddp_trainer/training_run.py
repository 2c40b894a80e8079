"""One training run from a config: builds its parts, owns the run directory, closes everything."""

import json
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers and DDP import, within the first step at the latest

from ddp_trainer import registry
from ddp_trainer.async_step import AsyncStep, Staleness
from ddp_trainer.checkpoint.file import State
from ddp_trainer.checkpoint.run_dir import check_changes, exclude_node, lock_run_dir
from ddp_trainer.checkpoint.store import CheckpointStore
from ddp_trainer.config.composition import to_saved
from ddp_trainer.config.errors import TransientError, require
from ddp_trainer.config.observers import ReportConfig
from ddp_trainer.config.plugins import plugin_versions
from ddp_trainer.config.schema import Config, OnCorruption, Resume
from ddp_trainer.distributed.environment import Environment, installed_versions, read_environment
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.world import World
from ddp_trainer.files import replace_text
from ddp_trainer.observers.console import EpochLines, ProgressBar, SkipWarning, logging_to
from ddp_trainer.observers.failures.monitor import FailureMonitor
from ddp_trainer.observers.gradient_check import CorruptionError, GradientCheck
from ddp_trainer.observers.loggers.base import Logger, Loggers
from ddp_trainer.observers.pictures import Pictures
from ddp_trainer.observers.ranks import Ranks
from ddp_trainer.observers.start_lines import log_changes, log_header
from ddp_trainer.observers.step_times import StepTimer, StepTimes
from ddp_trainer.public_config import checked_copy
from ddp_trainer.recovery import Rounds, run_in_rounds
from ddp_trainer.sharded_step import WeightsHash
from ddp_trainer.start import Setup, set_up
from ddp_trainer.training.control import ControlPoint
from ddp_trainer.training.loop import fit
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.run import Events, Observer, ObserverError, TrainingRun
from ddp_trainer.training.summary import Status, Summary

logger = logging.getLogger(__name__)

STOPPED = "stopped"
"""The name of a file in the run directory: the run was stopped gracefully and is not finished."""


def run(config: Config, run_dir: Path | str | None = None) -> Summary:
    """Train as `config` says, in `run_dir`, and return the result. Collective.

    `run_dir` is ``<output_dir>/<name>`` unless given. Resumes from the newest checkpoint in
    `run_dir`, if there is one. With resume=never, a `run_dir` with results is renamed first.

    Raises:
        ConfigError: the config breaks a rule that depends on this machine, data set or directory.
        TransientError: a condition that may go away, such as another launch in the same directory.
    """
    environment = read_environment()
    config = checked_copy(config)
    run_dir = Path(run_dir or Path(config.output_dir).expanduser() / config.name)
    start = partial(set_up, config, environment)
    if config.recovery.min_ranks is None or not environment.under_torchrun:
        return run_once(start, run_dir, environment, Rounds())
    return run_in_rounds(
        lambda rounds: run_once(start, run_dir, environment, rounds),
        config.recovery,
        run_dir=run_dir,
        environment=environment,
        timeout_seconds=config.timeout_seconds,
    )


def run_once(
    start: Callable[..., Setup], run_dir: Path, environment: Environment, rounds: Rounds
) -> Summary:
    """Train in one process group. Collective.

    start: `set_up` with the config and the environment.
    rounds: the groups of the job, and what this process has kept of the one before.
    """
    with ExitStack() as stack, exits_as_errors():
        setup = start(stack, membership=rounds.membership, datasets=rounds.datasets)
        rounds.datasets = setup.datasets
        world = setup.world
        resume = Resume.auto
        if rounds.is_first:
            resume = resolve_resume(setup.config.resume, environment, world)
        open_run_dir(run_dir, to_saved(setup.config), world, resume=resume, stack=stack)
        stop = rounds.stop or catch_signals(environment, world, stack)
        training = build_run(
            setup, run_dir, environment=environment, stop=stop, stack=stack, rounds=rounds
        )
        stack.enter_context(rounds.watched(training))
        if world.is_main and rounds.is_first:
            log_header(training)
        # Gathered now, because ranks cannot communicate after an error.
        nodes = world.all_gather_object(environment.node)
        with consequences(training, nodes):
            summary = fit(training)
        training.enter(Phase.end)  # files and loggers may take as long as they need
        world.raise_on_any_rank(partial(record_summary, summary, training))
        training.emit("end")
        del training  # no DDP module may outlive the process group
    return summary


class ExitError(RuntimeError):
    """A part of the run, for example a metric of a plug-in, has called ``sys.exit``."""


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise `ExitError` in place of SystemExit, which could have the exit code of a success."""
    try:
        yield
    except SystemExit as error:
        raise ExitError(f"a part of the run has called sys.exit({error.code!r})") from error


@contextmanager
def consequences(training: TrainingRun, nodes: list[str]) -> Iterator[None]:
    """Exclude the node of a corrupt rank if the config says so; explain a full memory.

    nodes: the name of the node of each rank.
    """
    config = training.config
    try:
        with explain_full_memory(
            batch_size=config.global_batch_size, num_parts=config.gradient_accumulation_steps
        ):
            yield
    except CorruptionError as error:
        is_excluded = config.check.on_corruption is OnCorruption.exclude
        if training.world.is_main and is_excluded and error.rank is not None:
            exclude_node(training.run_dir, nodes[error.rank])
        raise
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(out_of_memory(training)) from error


@contextmanager
def explain_full_memory(*, batch_size: int, num_parts: int) -> Iterator[None]:
    """Raise `HostMemoryError` in place of an error of the allocator of CPU memory.

    batch_size: the global batch size. num_parts: the gradient accumulation steps.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise HostMemoryError(
            "this host has no memory left: set a smaller data.image_size or model,"
            f" {smaller_passes(batch_size=batch_size, num_parts=num_parts)}"
        ) from error


def smaller_passes(*, batch_size: int, num_parts: int) -> str:
    """Return the values of the config that halve the number of images in a pass."""
    return (
        f"gradient_accumulation_steps={2 * num_parts} for half as many images in a pass (with"
        f" shards, more of them in a new run), or global_batch_size={max(1, batch_size // 2)}"
    )


class HostMemoryError(RuntimeError):
    """The memory of the host is full; ``str(error)`` says which values of the config need less."""


class DeviceMemoryError(RuntimeError):
    """The memory of a GPU is full; ``str(error)`` says which values of the config need less."""


def out_of_memory(training: TrainingRun) -> str:
    """Return the message for a full GPU: what is in use, and which values need half of it."""
    config = training.config
    passes = training.train_step.settings.gradient_accumulation_steps
    images = -(-training.loaders.sampler.local_batch_size // passes)
    smaller = smaller_passes(
        batch_size=config.global_batch_size, num_parts=config.gradient_accumulation_steps
    )
    free, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.get_device_name()} has no memory left ({(total - free) / 2**30:.1f} of"
        f" {total / 2**30:.1f} GiB are in use) in a pass over {images} images: set"
        f" {smaller}"
    )


def resolve_resume(resume: Resume, environment: Environment, world: World) -> Resume:
    """Return `resume`; after a restart of the job, `Resume.auto` in place of never. Collective.

    All ranks are asked, because a rank on a new node does not know that the job was restarted.
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
    setup: Setup,
    run_dir: Path,
    *,
    environment: Environment,
    stop: GracefulStop,
    stack: ExitStack,
    rounds: Rounds,
) -> TrainingRun:
    """Return the run with its parts and observers, which `stack` closes. Collective."""
    config = setup.config
    world = setup.world
    # Entered first, so closed last: the monitor can end a rank that hangs while it closes parts.
    monitor = stack.enter_context(
        FailureMonitor(
            world, environment, stop, run_dir=run_dir, timeout_seconds=config.timeout_seconds
        )
    )
    rounds.connect(monitor)
    stack.enter_context(rounds.watched())
    chosen = config.logger if world.is_main else {}
    loggers = stack.enter_context(
        Loggers(build_each("logger", chosen, world, run_dir, returns=Logger))
    )
    loaders = setup.build_loaders()
    tree = to_saved(config)

    def check_state(state: State) -> None:
        check_changes(state["config"], tree, run_dir=run_dir)
        num_threads = state["config"]["num_threads"]
        require(
            config.shards is None or num_threads == config.num_threads,
            f"num_threads={config.num_threads} must be {num_threads}, as in {run_dir}: with shards,"
            " the number of threads is part of what a run computes",
        )
        require(
            state["data_fingerprint"] == loaders.datasets.fingerprint,
            f"{run_dir} was trained on other images than data={config.data.name} has here: restore "
            "the former images, choose name=… for a new run, or resume=never to start from step 0",
        )
        if world.is_main:
            peak = config.optimizer.scaled_lr(config.global_batch_size)
            log_changes(state, tree, peak_lr=peak, lr_factor=setup.lr_factor)

    checkpoints = CheckpointStore(
        run_dir / "checkpoints",
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        world=world,
        check_state=check_state,
    )
    stack.callback(checkpoints.close)
    monitor.is_saving = checkpoints.is_writing
    with explain_full_memory(
        batch_size=config.global_batch_size, num_parts=config.gradient_accumulation_steps
    ):
        step = setup.build_step()
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
        metrics=build_each("metric", config.metric, world, returns=Callable),
        should_stop=stop.poll,
    )
    training.events = Events(
        {
            **rounds.attach(training),
            **build_observers(training, monitor, loggers, stack),
        }
    )
    step.on_phase = training.enter
    monitor.emit_failure = partial(report_to_observers, training)
    return training


def report_to_observers(training: TrainingRun) -> None:
    """Call ``on_failure`` of each observer, even if another observer raises an exception."""
    for name in training.events.names_by_method["on_failure"]:
        try:
            training.events.call(name, "on_failure", training)
        except ObserverError as error:
            logger.warning("%s", error)


def build_each(
    group: str, configs: Mapping[str, Any], world: World, *arguments: Any, returns: Any
) -> dict[str, Any]:
    """Return the parts that the config chooses in a group, by name. Collective."""
    return world.raise_on_any_rank(
        lambda: {
            name: registry.build(group, part, *arguments, returns=returns)
            for name, part in configs.items()
        }
    )


def build_observers(
    training: TrainingRun, monitor: FailureMonitor, loggers: Loggers, stack: ExitStack
) -> dict[str, Observer]:
    """Return all observers by name, in the order in which they are called.

    The built-in observers add values to log records first, then the observers of the config. The
    loggers are called last, because they record the values that all others have added.
    """
    timer = StepTimer(training.world.device, training.model)
    config_observers = dict(training.config.observer)
    if training.config.report:
        config_observers.setdefault("report", ReportConfig())
    is_skipping = training.train_step.settings.skips_nonfinite
    bars: dict[str, Observer] = {}
    if ProgressBar.is_wanted(training.world):
        bar = ProgressBar()
        stack.callback(bar.close)
        bars["progress_bar"] = bar
    return {
        "failures": monitor,
        **({} if training.config.shards is None else {"weights_hash": WeightsHash()}),
        **({"staleness": Staleness()} if isinstance(training.train_step, AsyncStep) else {}),
        "ranks": Ranks(timer),  # before step_times, which ends the window of their timer
        "step_times": StepTimes(timer),
        **bars,
        **({"skip_warning": SkipWarning()} if is_skipping else {}),
        "epoch_lines": EpochLines(),
        "pictures": Pictures(loggers),
        **build_each("observer", config_observers, training.world, returns=Observer),
        "loggers": loggers,
    }


def open_run_dir(
    run_dir: Path, config: dict[str, Any], world: World, *, resume: Resume, stack: ExitStack
) -> None:
    """Create and lock `run_dir`, and log to it, until `stack` closes. Collective."""
    lock = lock_run_dir(run_dir, config, resume=resume, marker=STOPPED)
    backup_dir = world.raise_on_any_rank(
        lambda: stack.enter_context(lock) if world.is_main else None
    )
    stack.enter_context(logging_to(run_dir, rank=world.rank))
    if backup_dir is not None:
        logger.info("resume=never: renamed the former run to %s", backup_dir)
    if world.is_main:
        versions = installed_versions() | plugin_versions()
        write_output(run_dir / "versions.json", json.dumps(versions, indent=2) + "\n")


def record_summary(summary: Summary, training: TrainingRun) -> None:
    """On rank 0, write summary.json, and log the result; if stopped, log the step instead.

    If the launch was stopped, also write the file `STOPPED`.

    Raises:
        TransientError: the last checkpoint, or the file `STOPPED`, was not written: a scheduler
            must not consider this training as finished.
    """
    if not training.world.is_main:
        return
    training.checkpoints.check_saved()
    write_output(training.run_dir / "summary.json", summary.to_json())
    if summary.status is Status.stopped:
        path = training.run_dir / STOPPED
        try:
            replace_text(path, f"{summary.steps}\n")
        except OSError as error:
            raise TransientError(
                f"stopped at step {summary.steps}, and saved, but {path} was not written "
                f"({error.strerror}): start the same command again"
            ) from error
        logger.info("stopped at step %d, not finished: the same command resumes it", summary.steps)
        return
    logger.info(summary.line())
    folder = training.run_dir
    best = folder / "checkpoints" / "best.pt"
    logger.info(
        "%s; next: python -m ddp_trainer evaluate %s",
        f"best {best_score(summary)}: {best}"
        if best.is_file() and summary.best_value is not None
        else f"the newest checkpoint: {training.checkpoints.last_good}",
        shlex.quote(str(folder)),
    )


def best_score(summary: Summary) -> str:
    """Return split, metric and best value as text, such as "validation acc 0.9132"."""
    is_top1 = summary.select_by == "eval/top1"
    name = "acc" if is_top1 else summary.select_by.removeprefix("eval/")
    return f"{summary.eval_split} {name} {summary.best_value:.4f}"


def write_output(path: Path, text: str) -> None:
    """Write a file that training does not depend on; a failure only logs a warning."""
    try:
        replace_text(path, text)
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)
