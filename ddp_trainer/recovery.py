"""A training that goes on when ranks are lost: `recovery.min_ranks=M`.

When the process group has failed, each rank keeps its state in memory, leaves the group, and trains
in the next one, from the state of the rank that is furthest. A process that torchrun has started
again joins in the same way, but has no state of its own.
"""

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_trainer.checkpoint.file import State, broadcast_state, copied, write_file
from ddp_trainer.config.errors import one_line, plural, require
from ddp_trainer.config.schema import RecoveryConfig
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.distributed.environment import Environment, set_interface
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.membership import (
    JobEndedError,
    Membership,
    TooFewRanksError,
)
from ddp_trainer.distributed.process_group import shutdown
from ddp_trainer.distributed.world import RoundEndedError
from ddp_trainer.observers.failures.monitor import FailureMonitor
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.run import Observer, Stage, TrainingRun
from ddp_trainer.training.state import RunState
from ddp_trainer.training.step import TrainStep
from ddp_trainer.training.summary import Summary

logger = logging.getLogger(__name__)

LOST_PEER = ("gloo/transport", "NCCL")
"""Texts in the error of a collective that fails because another rank is gone."""
MAX_FRUITLESS = 10
"""How many rounds in a row may end without a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The state of a rank that has left its process group."""

    state: State
    stage: Stage
    is_best: bool
    records: list[list[Any]]
    """The records after step `records_after`, which the files of the loggers may lack."""
    records_after: int

    @property
    def position(self) -> tuple[int, int]:
        """Step and stage; the rank with the largest pair is the furthest."""
        return self.state["step"], self.stage


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeEvaluation:
    """The observers and records before an evaluation, to restore if a rank is lost in it."""

    observers: dict[str, Any]
    """The states of the observers, as checkpoints have them."""
    num_records: int
    """The length of `RecoveryState.records`."""


class BeforeStep:
    """A `StepHook` that copies buffers and metric sums, so that a step can be repeated."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.count = -1
        """`TrainStep.count` when `kept` was copied."""
        self.kept: list[tuple[Tensor, Tensor]] = []
        """Buffers, such as BatchNorm statistics, and the sums of metrics, each with a copy."""

    def before_forward(self, images: Tensor, labels: Tensor) -> None:
        self.count = self.step.count
        changed = (*self.step.model.buffers(), self.step.sums.vector)
        self.kept = [(tensor, tensor.clone()) for tensor in changed]

    def before_optimizer(self, images: Tensor, labels: Tensor) -> None:
        pass

    def restore(self) -> None:
        """Restore the copies if the step was interrupted; after a whole step, do nothing."""
        if self.count == self.step.count:
            for tensor, copy in self.kept:
                tensor.copy_(copy)


def hold(run: TrainingRun, before: BeforeEvaluation | None) -> Held:
    """Return the state of this rank, after which `run` is one of this rank alone.

    Not collective: the other ranks may be gone. before: None if no evaluation has begun.
    """
    alone = replace(run.world, rank=0, world_size=1)
    run.progress.world = alone
    run.train_step.world = alone  # its sums are then those of this rank
    run.train_step.buffer_world = alone
    state = RunState(run).state_dict()
    copy = copied(state)
    records = run.recovery.records
    if before is not None and run.stage is Stage.evaluation:
        copy["observers"] = before.observers
        records = records[: before.num_records]
    # A stop that was interrupted is requested again: the processes still know of it.
    stage = Stage.step if run.is_interrupted else run.stage
    return Held(
        state=copy,
        stage=stage,
        is_best=run.progress.is_best,
        records=records,
        records_after=run.recovery.records_after,
    )


def restore_furthest(run: TrainingRun, state: RunState, held: Held | None) -> bool:
    """Restore the furthest state that a rank holds, else the newest checkpoint. Collective.

    held: the state that this rank holds. Returns False if there is neither.
    """
    positions = run.world.all_gather_object(list(held.position) if held else [])
    known = [position for position in positions if position]
    if not known:
        return run.checkpoints.restore(state)
    source = positions.index(max(known))
    outline = [held.stage, held.is_best, held.records_after, held.records] if held else []
    stage, run.progress.is_best, records_after, records = run.world.broadcast_object(
        outline, source=source
    )
    run.recovery.records_after = records_after
    run.recovery.records = records
    furthest = broadcast_state(held.state if held else {}, run.world, source=source)
    state.load_state_dict(furthest)
    run.checkpoints.adopt(furthest)
    run.stage = Stage(stage)
    return True


class Rounds:
    """The process groups of a job, one after another.

    A job with this base class has one group, and ends when a rank is lost.
    """

    stop: GracefulStop | None = None
    """The flag of the graceful stop, which is set for all groups; None: each run has its own."""
    datasets: Datasets | None = None
    """The data sets of the group before."""
    is_first = True
    """Whether this is the first group of the job."""

    @property
    def membership(self) -> Membership | None:
        """Chooses the members of each group; None: they are all ranks that torchrun started."""
        return None

    def connect(self, monitor: FailureMonitor) -> None:
        """Let this object and the failure monitor of the new group know of each other."""

    def attach(self, run: TrainingRun) -> dict[str, Observer]:
        """Let `run` go on from the state that is kept; return observers to add."""
        return {}

    @contextmanager
    def watched(self, run: TrainingRun | None = None) -> Iterator[None]:
        """Raise RoundEndedError in place of an error whose cause is the loss of a rank.

        run: the run whose state is then kept.
        """
        yield


class Recovery(Rounds):
    """This process in the rounds of a job that goes on when ranks are lost."""

    def __init__(self, membership: Membership, stop: GracefulStop) -> None:
        self._membership = membership
        self.stop = stop
        self.held: Held | None = None
        """The state of the last process group."""
        self.has_state = False
        """Whether the state of the present group was restored, or is that of the start."""
        self.before_evaluation: BeforeEvaluation | None = None
        self.before_step: BeforeStep | None = None
        self.has_root_cause: Callable[[], bool] = lambda: False
        """Returns whether a rank has reported an error that ends the job."""
        self.ended_at: float | None = None
        """When the last round ended, by `time.monotonic`; None if this process was in none."""
        self.position: tuple[int, int] | None = None
        self.fruitless = 0
        """How many rounds in a row have ended at this position."""

    @property
    def membership(self) -> Membership:
        return self._membership

    @property
    def is_first(self) -> bool:
        return self.membership.number == 1

    def connect(self, monitor: FailureMonitor) -> None:
        self.has_root_cause = monitor.has_root_cause
        monitor.remove_rank = self.membership.remove

    def attach(self, run: TrainingRun) -> dict[str, Observer]:
        run.recovery.is_on = True
        run.recovery.is_resumed = not self.is_first
        run.progress.has_whole_digest = True
        self.before_step = BeforeStep(run.train_step)
        run.train_step.hooks.append(self.before_step)
        run.recovery.restore = lambda state: self.restore(run, state)
        run.recovery.check_group = self.membership.check
        run.recovery.has_candidates = lambda: self.membership.has_candidates
        return {"recovery": RecoveryLog(self)}

    def restore(self, run: TrainingRun, state: RunState) -> bool:
        """Restore as `restore_furthest` does; from then on, this rank has a state. Collective."""
        is_resumed = restore_furthest(run, state, self.held)
        self.has_state = True
        return is_resumed

    @contextmanager
    def watched(self, run: TrainingRun | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self.is_loss(error):
                raise
            self.ended_at = self.ended_at or time.monotonic()
            self.membership.leave_round()
            if run is not None and self.has_state:
                if self.before_step is not None:
                    self.before_step.restore()
                self.held = hold(run, self.before_evaluation)
                self.has_state = False
        else:
            return
        raise RoundEndedError

    def is_loss(self, error: BaseException | None) -> bool:
        """Return whether `error`, or an error that has caused it, is that of a lost rank."""
        while error is not None:
            if isinstance(error, RoundEndedError):
                return True
            is_lost = isinstance(error, RuntimeError) and any(t in str(error) for t in LOST_PEER)
            if is_lost and not self.has_root_cause():
                return True
            error = error.__cause__
        return False

    def count(self) -> None:
        """Count the rounds without a step.

        Raises:
            TransientError: there were too many in a row.
        """
        former = self.position
        self.position = self.held.position if self.held else None
        self.fruitless = self.fruitless + 1 if self.position == former else 0
        if self.fruitless >= MAX_FRUITLESS:
            raise self.membership.fail(
                f"{MAX_FRUITLESS} process groups in a row have failed before a step: look at the"
                " ranks that are started again and again"
            )

    def save(self, run_dir: Path) -> str:
        """Write the state that is kept to a checkpoint; return a clause about it."""
        if self.held is None or self.held.stage is not Stage.step:
            return "the newest checkpoint was saved before"
        path = run_dir / "checkpoints" / f"step-{self.held.state['step']:08d}.pt"
        try:
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                write_file(path, self.held.state)
        except OSError as error:
            return str(error)
        return f"the state is saved as {path}"


def run_in_rounds(
    train: Callable[[Recovery], Summary],
    config: RecoveryConfig,
    *,
    run_dir: Path,
    environment: Environment,
    timeout_seconds: int,
) -> Summary:
    """Call ``train(rounds)`` for each process group of which this process is a member.

    Raises:
        TransientError: the job has failed, or too few ranks are left.
    """
    require(
        environment.torchrun_ranks == 1,
        f"recovery.min_ranks={config.min_ranks} needs a torchrun process for each rank,"
        f" because torchrun ends all of its ranks, here {environment.torchrun_ranks}, when one is"
        " lost: start with ISOLATED=1 launch/local.sh, or with launch/multinode.sh",
    )
    gc.freeze()  # so that `shutdown` need not look at what is imported
    set_interface(environment)
    environment.record_start()
    timeout = timedelta(seconds=timeout_seconds)
    store = next(dist.rendezvous("env://", timeout=timeout))[0]
    membership = Membership(
        store,
        slot=environment.rank,
        num_slots=environment.world_size,
        min_ranks=config.min_ranks or 1,
        join_seconds=config.join_seconds,
        silent_seconds=config.silent_seconds,
    )
    with membership, GracefulStop(environment.stop_file, under_torchrun=True) as stop:
        rounds = Recovery(membership, stop)
        while True:
            try:
                with rounds.watched():
                    summary = train(rounds)
                membership.finish()
                return summary
            except JobEndedError:
                logger.warning("the job has finished without this rank, which came too late")
                sys.exit(0)
            except TooFewRanksError as error:
                fix = "start the same command again"
                raise membership.fail(f"{error}; {rounds.save(run_dir)}: {fix}") from None
            except RoundEndedError:
                pass
            except Exception as error:
                membership.fail(one_line(error))  # for processes that are started again
                raise
            shutdown()  # here, where no traceback keeps DDP modules
            rounds.count()


class RecoveryLog(Observer):
    """Logs which ranks were lost and which have joined, and how long the others have paused."""

    def __init__(self, rounds: Recovery) -> None:
        self.rounds = rounds
        self.job = rounds.membership.job
        self.members: dict[str, list[str]] = {}
        """The nonce and the host of each member of the last round, by its slot."""
        self.lost_seconds = 0.0
        self.sizes: list[list[int]] = []
        """For each round the first step, and the number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        names = ("job", "members", "lost_seconds", "sizes")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["job"] == self.job:
            self.members = state["members"]
        self.lost_seconds = state["lost_seconds"]
        self.sizes = state["sizes"]

    def on_phase(self, run: TrainingRun, phase: Phase) -> None:
        is_due = phase is Phase.evaluation and run.stage is Stage.evaluation
        if is_due and self.rounds.before_evaluation is None:
            states = run.events.emit("state_dict")
            self.rounds.before_evaluation = BeforeEvaluation(
                observers=deepcopy({name: state for name, state in states.items() if state}),
                num_records=len(run.recovery.records),
            )

    def on_save(self, run: TrainingRun) -> None:
        self.rounds.before_evaluation = None

    def on_start(self, run: TrainingRun) -> None:
        self.rounds.before_evaluation = None
        ended_at = self.rounds.ended_at
        self.rounds.ended_at = None
        paused = run.world.all_gather_object(time.monotonic() - ended_at if ended_at else 0.0)
        self.began = time.monotonic() - max(paused)
        former = self.members
        self.members = self.rounds.membership.members()
        self.sizes = [*self.sizes, [run.step, run.world.world_size]]
        lost = [slot for slot, entry in former.items() if self.members.get(slot) != entry]
        new = [slot for slot, entry in self.members.items() if former.get(slot) != entry]
        parts = [f"rank {slot} on {former[slot][1]} was lost" for slot in lost]
        parts += [f"rank {slot} on {self.members[slot][1]} joined" for slot in new]
        self.news = f"{', '.join(parts)} at step {run.step}" if former else ""

    def on_step(self, run: TrainingRun) -> None:
        if not self.news:
            return
        seconds = time.monotonic() - self.began
        self.lost_seconds += seconds
        logger.info(
            "%s; %s went on %.2f s later", self.news, plural(run.world.world_size, "rank"), seconds
        )
        self.news = ""

    def on_log(self, run: TrainingRun) -> None:
        run.log(
            {
                "recovery/rounds": len(self.sizes),
                "recovery/lost_seconds": self.lost_seconds,
                "recovery/world_size": run.world.world_size,
            }
        )

    def summary_values(self, run: TrainingRun) -> Mapping[str, Any]:
        return {
            "rounds": len(self.sizes),
            "lost_seconds": self.lost_seconds,
            "ranks_by_step": self.sizes,
        }
