"""`TrainingRun`, a training in progress; `Observer`; and `Events`, which calls the observers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.checkpoint.store import Best, CheckpointStore
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


class Stage(IntEnum):
    """The loop's next action, in the order after a step; `step` begins the next one."""

    control_point = 0
    evaluation = 1
    save = 2
    step = 3


class ObserverError(RuntimeError):
    """An observer raised an exception, which is the ``__cause__``; the message names both."""


class Observer:
    """Watches a training. A subclass overrides the methods that it needs; the others do nothing.

    Every rank has all observers of the config and calls them in the same order. A method may
    therefore be collective, except three: `on_phase`, because ranks may evaluate different numbers
    of batches, and `on_failure` and `state_dict`, because other ranks may have ended. An exception
    in a method ends the training, except in `on_failure`, where it is logged as a warning.
    """

    def on_start(self, run: "TrainingRun") -> None:
        """Called before training begins or resumes.

        When ranks are lost or join, all observers are made anew, and this is called again.
        """

    def on_epoch(self, run: "TrainingRun") -> None:
        """Called before the first step of an epoch, and when a launch resumes within an epoch."""

    def on_phase(self, run: "TrainingRun", phase: Phase) -> None:
        """Called when this rank enters `phase`, which is a part of a step or of the training."""

    def on_step(self, run: "TrainingRun") -> None:
        """Called after each optimizer step; ``run.step`` is its number, ``run.batch`` its batch."""

    def on_log(self, run: "TrainingRun") -> None:
        """Called at log points, and at a control point which finds that training diverges.

        ``run.values`` is the log record; ``run.log({tag: value})`` adds to it before loggers write.
        """

    def on_evaluation(self, run: "TrainingRun") -> None:
        """Called after each evaluation; ``run.evaluation`` and ``run.values`` have its result."""

    def on_save(self, run: "TrainingRun") -> None:
        """Called after the state for a checkpoint was copied; the file may be written later."""

    def on_failure(self, run: "TrainingRun") -> None:
        """Called once before the job fails; not for ConfigError, PluginError or TransientError.

        All observers together have two seconds. The call is made in another thread, because the
        main thread may be in a collective that never returns.
        """

    def on_end(self, run: "TrainingRun") -> None:
        """Called at the end of a launch that did not fail, after checkpoints and summary.json."""

    def rank_values(self, run: "TrainingRun") -> Sequence[float]:
        """Return numbers of this rank at a log point, always the same count, on every rank.

        The all-reduce of the control point exchanges them, and `on_log` gets those of all ranks
        from ``run.gathered(self)``, which is empty if training diverges between two log points.
        """
        return ()

    def summary_values(self, run: "TrainingRun") -> Mapping[str, Any]:
        """Return values of `Summary` by the name of the field; called before `on_end`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, as builtins and tensors; all ranks restore the same one."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; called before `on_start` if a checkpoint has one."""


class Events:
    """Calls the methods of observers. An observer gets only calls of methods that it overrides."""

    def __init__(self, observers: Mapping[str, Observer]) -> None:
        """observers: by name, in the order of the calls. Messages and checkpoints use the names."""
        self.observers = observers
        self.names_by_method = {
            method: [
                name
                for name, observer in observers.items()
                if getattr(type(observer), method) is not default
            ]
            for method, default in vars(Observer).items()
            if not method.startswith("_")
        }

    def emit(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call `method` of each observer that overrides it; return the results by name."""
        return {name: self.call(name, method, *arguments) for name in self.names_by_method[method]}

    def stop_calling(self, method: str, observer: Observer) -> None:
        """Call `method` of `observer` no more."""
        names = self.names_by_method[method]
        self.names_by_method[method] = [n for n in names if self.observers[n] is not observer]

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call `method` of the observer `name`; return its result.

        Raises:
            ObserverError: the observer has raised an exception.
        """
        try:
            return getattr(self.observers[name], method)(*arguments)
        except Exception as error:  # because a plug-in may raise any exception
            reason = f"{type(error).__name__}: {error}"
            raise ObserverError(f"observer={name} failed in {method} ({reason})") from error


class RecoveryState:
    """The records and functions with which training goes on when another rank is lost."""

    def __init__(self, restore: Callable[[Any], bool]) -> None:
        self.is_on = False
        """Whether this job goes on without ranks that are lost."""
        self.restore = restore
        """Restores a `RunState`; returns False if the training begins. Collective."""
        self.is_resumed = False
        """Whether this process group goes on where another one ended."""
        self.records: list[list[Any]] = []
        """The calls of loggers since the last save: for each the method and its arguments."""
        self.records_after = 0
        """The step of that save."""
        self.check_group: Callable[[], None] = lambda: None
        """Raises RoundEndedError if a rank was lost."""
        self.has_candidates: Callable[[], bool] = lambda: False
        """Returns whether a process waits to join the process group."""


class TrainingRun:
    """A training in progress: its parts, its progress, and the requests of observers."""

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
        """should_stop: returns whether a signal or the stop file asks for a graceful stop."""
        self.config = config
        """The `Config` of the run."""
        self.config_tree = config_tree
        """The config as nested dicts, in the form in which it is saved."""
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
            folder=self.run_dir,
        )
        self.progress = Progress(self.world, train_step)
        self.events = Events({})
        self.steps_per_epoch = loaders.sampler.steps_per_epoch
        """The number of optimizer steps of a whole epoch."""
        self.epoch = 0
        """The number of the current epoch, from 0."""
        self.batch: Batch | None = None
        """This rank's share of the batch of the current or last step; None before step 1."""
        self.values: Values = {}
        """The values of the newest log record by tag."""
        self.last_logged: Values = {}
        """The values of the last log point of this launch; {} before the first."""
        self.results: SampleResults | None = None
        """This rank's results if the model was evaluated after the last step, else None."""
        self.stage = Stage.step
        """The loop's next action."""
        self.is_stopping = False
        """Whether a graceful stop (a signal, or the stop file) ends this launch."""
        self.recovery = RecoveryState(checkpoints.restore)
        self.requested_stop: str | None = None
        """The reason that an observer of this rank has given to `request_stop`, if one has."""
        self.has_requested_save = False
        """Whether an observer of this rank has called `request_save` since the last decision."""
        self._by_rank: dict[Observer, Tensor] = {}
        self._lengths: dict[str, int] = {}

    @property
    def step(self) -> int:
        """The number of optimizer steps taken, over all launches."""
        return self.train_step.count

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
        """Whether nothing is left to train, to evaluate or to save."""
        return self.stage is Stage.step and self.is_trained

    @property
    def is_trained(self) -> bool:
        """Whether no step is left to take."""
        return self.step >= self.last_step or self.progress.stop_reason is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether a graceful stop, not an observer, ends this launch within an epoch."""
        return self.is_stopping and not self.is_trained and self.step < self.last_step_of_epoch

    @property
    def status(self) -> Status:
        """The status of this launch, if it ends now."""
        if self.progress.stop_reason is not None:
            return Status.stopped_early
        if self.step < self.last_step:
            return Status.stopped
        return Status.finished if self.step >= self.total_steps else Status.max_steps

    def request_stop(self, reason: str) -> None:
        """End the training at the next control point, or after an evaluation in progress.

        One rank is enough to request it. The model is then evaluated and saved, and summary.json
        contains `reason`. The same command then does not train any further.
        """
        self.requested_stop = reason

    def request_save(self) -> None:
        """Save a checkpoint at the next control point. One rank is enough to request it."""
        self.has_requested_save = True

    def log(self, values: Mapping[str, Value]) -> None:
        """Add values, by tag, to the record of this log point or evaluation (see `on_log`)."""
        self.values.update(values)

    def gathered(self, observer: Observer) -> Tensor:
        """Return the results of `observer.rank_values` on all ranks, float64 [world size, n].

        n is 0 if `on_log` is called at a control point that is not a log point. This happens if
        training diverges.
        """
        no_numbers = torch.zeros(self.world.world_size, 0, dtype=torch.float64)
        return self._by_rank.get(observer, no_numbers)

    # --- for the loop ---------------------------------------------------------------------------

    def emit(self, event: str) -> None:
        """Call ``on_<event>`` of each observer."""
        self.events.emit(f"on_{event}", self)

    def enter(self, phase: Phase) -> None:
        """Call `on_phase` of each observer."""
        self.events.emit("on_phase", self, phase)

    def rank_values(self) -> list[float]:
        """Return the numbers of all observers of this rank; the first time, it is collective."""
        parts = self.events.emit("rank_values", self)
        lengths = {name: len(part) for name, part in parts.items()}
        self._lengths = self._lengths or self.world.broadcast_object(lengths)
        if lengths != self._lengths:
            first = f"{self._lengths} at first on rank 0"
            raise ObserverError(f"rank_values returned {lengths} numbers, but {first}")
        return [value for part in parts.values() for value in part]

    def split_by_observer(self, by_rank: Tensor) -> None:
        """Store the columns of `by_rank`, float64 [world size, n], by observer, for `gathered`."""
        lengths = self._lengths if by_rank.numel() else {}
        columns = zip(lengths, by_rank.split(list(lengths.values()), dim=1), strict=True)
        self._by_rank = {self.events.observers[name]: part for name, part in columns}

    def share_stop_request(self) -> None:
        """Set ``progress.stop_reason`` on all ranks if any rank has requested a stop. Collective.

        If no rank has, a reason that was restored from a checkpoint is kept.
        """
        reasons = self.world.all_gather_object(self.requested_stop)
        requested = (reason for reason in reasons if reason is not None)
        self.progress.stop_reason = next(requested, self.progress.stop_reason)


class Progress:
    """The progress of a run: last evaluation, best accuracy, samples of this epoch, time."""

    def __init__(self, world: World, train_step: TrainStep) -> None:
        self.world = world
        self.train_step = train_step
        self.best = Best()
        """The scores of the best checkpoint."""
        self.evaluation = Evaluation()
        self.digest = SampleDigest(world.device)
        self.has_whole_digest = False
        """Whether `digest` has the samples of all ranks, because one of them may be lost."""
        self.all_ids = torch.empty(0)
        """If so, the ids of the samples of each global batch of the epoch, int64 [steps, G]."""
        self.is_best = False
        """Whether the next checkpoint becomes best.pt."""
        self.skipped_updates = 0.0
        """Number of skipped updates up to the last log point; with local SGD, a mean over ranks."""
        self.skipped_in_epoch = 0.0
        """Those of `skipped_updates` that belong to this epoch."""
        self.stop_reason: str | None = None
        """The reason for which an observer ended the training; None: no observer ended it."""
        self.earlier_seconds = 0.0
        self.began = time.perf_counter()

    def add_samples(self, ids: Tensor, *, step: int) -> None:
        """Add this rank's samples of step `step` of the epoch, int64 [B], to the digest."""
        self.digest.add(self.all_ids[step] if self.has_whole_digest else ids, step=step)

    def total_digest(self) -> Tensor:
        """Return the sum of the digests of all ranks, int64 [2]. Collective."""
        total = self.digest.vector.clone()
        return total if self.has_whole_digest else self.world.all_reduce(total)

    def total_sums(self) -> Tensor:
        """Return the sums over all ranks, but for skipped updates their mean. Collective."""
        total = self.world.all_reduce(self.train_step.own_sums.clone())
        total[3] /= self.world.world_size
        return total

    def seconds(self) -> float:
        """Return the wall-clock seconds spent on this run, over all launches."""
        return self.earlier_seconds + time.perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        """Return the progress for a checkpoint; its tensors are sums over all ranks. Collective."""
        return {
            "digest": self.total_digest(),
            "metric_sums": self.total_sums(),
            "skipped_updates": self.skipped_updates,
            "skipped_in_epoch": self.skipped_in_epoch,
            "seconds": self.seconds(),
            "evaluation": list(astuple(self.evaluation)),
            "stop_reason": self.stop_reason,
        }

    def load_state_dict(self, state: dict[str, Any], *, best: Best) -> None:
        """Restore a result of `state_dict`.

        Only rank 0 restores sums of which each rank has a part, because later sums over ranks would
        count them several times.
        """
        self.best = best
        sums = state["metric_sums"].to(self.world.device, copy=True)
        sums[3] *= self.world.world_size  # saved as a mean over ranks, see `total_sums`
        if self.world.is_main or self.has_whole_digest:
            self.digest.vector.copy_(state["digest"])
        if self.world.is_main:
            self.train_step.sums.vector += sums
        elif self.train_step.has_whole_sums:
            self.train_step.sums.vector[:3] += sums[:3]  # rank 0 restores skipped updates for all
        self.skipped_updates = state["skipped_updates"]
        self.skipped_in_epoch = state["skipped_in_epoch"]
        self.earlier_seconds = state["seconds"]
        self.evaluation = Evaluation(*state["evaluation"])
        self.stop_reason = state["stop_reason"]
