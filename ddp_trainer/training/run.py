"""A training as its observers see it: `TrainingRun`, the base class `Observer`, and the events."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.checkpoint.store import CheckpointStore
from ddp_trainer.data.loaders import Batch, Loaders
from ddp_trainer.distributed.world import World
from ddp_trainer.training.bad_samples import BadSamples
from ddp_trainer.training.control import ControlPoint
from ddp_trainer.training.evaluation import Evaluation, Metric, SampleResults
from ddp_trainer.training.metrics import SampleDigest
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.step import TrainStep
from ddp_trainer.training.summary import Status

Value = float | str
Values = dict[str, Value]
"""Values of a log record by tag, such as ``train/loss``."""


class ObserverError(RuntimeError):
    """An observer raised an exception, which is the ``__cause__``; the message names both."""


class Observer:
    """Watches a training. A subclass overrides the methods that it needs; those here do nothing.

    Every rank has each observer, and calls its methods in the order of registration; a method may
    therefore be collective. An exception in a method ends the training.
    """

    def on_start(self, run: "TrainingRun") -> None:
        """Called before the first step of a launch, after a checkpoint was restored."""

    def on_epoch(self, run: "TrainingRun") -> None:
        """Called before the first step of an epoch, or of the rest of one after a resume."""

    def on_phase(self, run: "TrainingRun", phase: Phase) -> None:
        """Called when this rank enters a phase of a step, or another phase of the training."""

    def on_step(self, run: "TrainingRun") -> None:
        """Called after each optimizer step; ``run.step`` counts it, ``run.batch`` is its batch."""

    def on_log(self, run: "TrainingRun") -> None:
        """Called after each logged step; ``run.values`` has the values of this record so far.

        ``run.log({tag: value})`` adds values, which the loggers then record.
        """

    def on_evaluation(self, run: "TrainingRun") -> None:
        """Called after each evaluation; ``run.evaluation`` and ``run.values`` have its result."""

    def on_save(self, run: "TrainingRun") -> None:
        """Called after the state for a checkpoint was taken; the file is written later."""

    def on_failure(self, run: "TrainingRun") -> None:
        """Called once before the job ends with a failure; it has two seconds.

        It may run in another thread, while the main thread is in a collective that never returns.
        """

    def on_end(self, run: "TrainingRun") -> None:
        """Called at the end of a launch that did not fail, after all files were written."""

    def rank_values(self, run: "TrainingRun") -> Sequence[float]:
        """Return numbers of this rank, as many as on other ranks; called before each `on_log`.

        They travel with the control point's own collective: in `on_log`, ``run.gathered(self)`` has
        those of all ranks.
        """
        return ()

    def summary_values(self, run: "TrainingRun") -> Mapping[str, Any]:
        """Return values for fields of `Summary`; called at the end, before `on_end`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a resume, as builtins and tensors; rank 0's is saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, before `on_start`, if a checkpoint has one."""


class Events:
    """Calls the methods of all observers. Which observers override a method is known in advance."""

    def __init__(self, observers: Sequence[Observer], names: Sequence[str]) -> None:
        """names: for each observer its name in messages and in checkpoints."""
        self.observers = dict(zip(names, observers, strict=True))

        def handlers(method: str) -> list[tuple[str, Callable[..., Any]]]:
            default = getattr(Observer, method)
            return [
                (name, getattr(observer, method))
                for name, observer in self.observers.items()
                if getattr(type(observer), method) is not default
            ]

        events = [method for method in vars(Observer) if method.startswith("on_")]
        self.handlers = {method: handlers(method) for method in events}
        self.reporters = handlers("rank_values")

    def emit(self, method: str, *arguments: Any) -> None:
        """Call `method` of each observer.

        Raises:
            ObserverError: an observer has raised an exception.
        """
        for name, handler in self.handlers[method]:
            try:
                handler(*arguments)
            except Exception as error:  # the code of a plug-in may raise anything
                reason = f"{type(error).__name__}: {error}"
                raise ObserverError(f"observer={name} failed in {method} ({reason})") from error


class TrainingRun:
    """A training in progress: its parts, its progress, and what observers may ask for."""

    def __init__(
        self,
        config: Any,
        *,
        config_tree: dict[str, Any],
        train_step: TrainStep,
        loaders: Loaders,
        checkpoints: CheckpointStore,
        control: ControlPoint,
        metrics: Mapping[str, Metric],
        should_stop: Callable[[], bool],
    ) -> None:
        """should_stop: whether a signal or the stop file asks this rank for a graceful stop."""
        self.config = config
        """The `Config` of the run."""
        self.config_tree = config_tree
        """The config as nested dicts, as it is saved."""
        self.train_step = train_step
        self.loaders = loaders
        self.checkpoints = checkpoints
        self.control = control
        self.metrics = metrics
        self.should_stop = should_stop
        self.world: World = train_step.world
        self.model: nn.Module = train_step.model
        self.run_dir: Path = checkpoints.folder.parent
        self.bad_samples = BadSamples(
            loaders.bad_samples,
            self.world,
            are_skipped=config.data.on_bad_image.name == "skip",
            run_dir=self.run_dir,
        )
        self.progress = Progress(self.world, train_step)
        self.events = Events([], [])
        self.epoch = 0
        """The number of the current epoch, from 0."""
        self.batch: Batch | None = None
        """This rank's share of the batch of the last step."""
        self.values: Values = {}
        """The values of the newest log record by tag."""
        self.last_logged: Values = {}
        """The values of the last log point of this launch; empty before the first."""
        self.results: SampleResults | None = None
        """The results of this rank's samples if the model was evaluated after the last step."""
        self.is_stopping = False
        """Whether a graceful stop (a signal, or the stop file) ends this launch."""
        self._requested_stop: str | None = None
        self.has_requested_save = False
        """Whether an observer of this rank has called `request_save` since the last decision."""
        self._by_rank: dict[Observer, Tensor] = {}

    @property
    def step(self) -> int:
        """The number of optimizer steps taken, over all launches."""
        return self.train_step.count

    @property
    def steps_per_epoch(self) -> int:
        """The number of optimizer steps of a whole epoch."""
        return self.loaders.sampler.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The optimizer step at which the last epoch ends."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def last_step(self) -> int:
        """The optimizer step at which this launch ends unless it is stopped."""
        return min(self.total_steps, self.config.max_steps or self.total_steps)

    @property
    def last_step_of_epoch(self) -> int:
        """The optimizer step at which this epoch or this launch ends, whichever is earlier."""
        return min(self.last_step, (self.epoch + 1) * self.steps_per_epoch)

    @property
    def evaluation(self) -> Evaluation:
        """The result of the last evaluation."""
        return self.progress.evaluation

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train."""
        return self.step >= self.last_step or self.progress.stop_reason is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether a graceful stop ends this launch before the end of an epoch."""
        return self.is_stopping and self.step < self.last_step_of_epoch

    @property
    def status(self) -> Status:
        """The status of this launch, if it ends now."""
        if self.progress.stop_reason is not None:
            return Status.stopped_early
        if self.step < self.last_step:
            return Status.stopped
        return Status.finished if self.step >= self.total_steps else Status.max_steps

    def request_stop(self, reason: str) -> None:
        """End the training at the next control point, as finished. Any rank may ask for it.

        The model is evaluated and saved, and summary.json has `reason`. The same command then finds
        nothing left to train.
        """
        self._requested_stop = reason

    def request_save(self) -> None:
        """Save a checkpoint at the next control point. Any rank may ask for it."""
        self.has_requested_save = True

    def log(self, values: Mapping[str, Value]) -> None:
        """Add values, by tag, to the record of this log point or evaluation (see `on_log`)."""
        self.values.update(values)

    def gathered(self, observer: Observer) -> Tensor:
        """Return the numbers of `observer.rank_values` of all ranks, float64 [W, n].

        n is 0 if a log point was not planned, because a value was not finite.
        """
        nothing = torch.zeros(self.world.world_size, 0, dtype=torch.float64)
        return self._by_rank.get(observer, nothing)

    # --- for the loop ---------------------------------------------------------------------------

    def emit(self, event: str) -> None:
        """Call ``on_<event>`` of each observer."""
        self.events.emit(f"on_{event}", self)

    def enter(self, phase: Phase) -> None:
        """Call `on_phase` of each observer."""
        self.events.emit("on_phase", self, phase)

    def rank_values(self) -> list[float]:
        """Return the numbers of all observers of this rank, and remember where each one's are."""
        parts = [(name, handler(self)) for name, handler in self.events.reporters]
        self._lengths = {name: len(part) for name, part in parts}
        return [value for _, part in parts for value in part]

    def split_by_observer(self, by_rank: Tensor) -> None:
        """Make the columns of `by_rank`, [W, n], available through `gathered`."""
        if not by_rank.numel():
            self._by_rank = {}
            return
        columns = by_rank.split(list(self._lengths.values()), dim=1)
        names = zip(self._lengths, columns, strict=True)
        self._by_rank = {self.events.observers[name]: part for name, part in names}

    @property
    def has_requested_stop(self) -> bool:
        """Whether an observer of this rank has called `request_stop`."""
        return self._requested_stop is not None

    def settle_stop_request(self) -> None:
        """Set ``progress.stop_reason`` on all ranks if any rank has asked to stop. Collective."""
        reasons = self.world.all_gather_object(self._requested_stop)
        self.progress.stop_reason = next(filter(None, reasons), None)


class Progress:
    """The progress of a run: last evaluation, best accuracy, samples of this epoch, time."""

    def __init__(self, world: World, train_step: TrainStep) -> None:
        self.world = world
        self.sums = train_step.sums
        self.best_top1 = 0.0
        self.evaluation = Evaluation()
        self.digest = SampleDigest(world.device)
        self.stop_reason: str | None = None
        """Why an observer ended the training; None: it did not."""
        self.earlier_seconds = 0.0
        self.began = time.perf_counter()

    def seconds(self) -> float:
        """Return the wall-clock seconds spent on this run, over all launches."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        """Return tensors (sums over ranks) and builtins for a checkpoint. Collective."""
        return {
            "digest": self.world.all_reduce(self.digest.vector.clone()),
            "window": self.world.all_reduce(self.sums.vector.clone()),
            "seconds": self.seconds(),
            "evaluation": list(astuple(self.evaluation)),
            "stop_reason": self.stop_reason,
        }

    def load_state_dict(self, state: dict[str, Any], *, best_top1: float) -> None:
        """Restore a result of `state_dict`. Only rank 0 restores the sums over ranks."""
        self.best_top1 = best_top1
        if self.world.is_main:
            self.digest.vector += state["digest"].to(self.world.device)
            self.sums.vector += state["window"].to(self.world.device)
        self.earlier_seconds = state["seconds"]
        self.evaluation = Evaluation(*state["evaluation"])
        self.stop_reason = state["stop_reason"]
