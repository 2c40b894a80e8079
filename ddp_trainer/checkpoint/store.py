"""Writes the checkpoints of a run in the background, and restores the newest good checkpoint."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ddp_trainer.checkpoint.file import (
    DamagedCheckpointError,
    State,
    broadcast_state,
    check_readable,
    copied,
    first_nonfinite,
    read_state,
    write_file,
)
from ddp_trainer.config.errors import ConfigError, TransientError, require
from ddp_trainer.distributed.world import World
from ddp_trainer.files import held_folder, remove_unfinished

logger = logging.getLogger(__name__)

PLAIN_STATE = "use only tensors, numbers, texts, lists and dicts in the states of your own parts"


class Checkpointable(Protocol):
    """An object that can be saved and restored. Collective: every rank must call both methods."""

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


@dataclass(frozen=True, slots=True)
class Best:
    """The value of `select_by` and the top-1 of the best checkpoint; None before the first one."""

    value: float | None = None
    top1: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"best_value": self.value, "best_top1": self.top1}


def best_of(state: State) -> Best:
    """Return the best scores in a checkpoint; older ones chose by top-1, and have only that."""
    return Best(state.get("best_value", state.get("best_top1")), state.get("best_top1"))


def step_files(folder: Path) -> list[Path]:
    """Return the paths of the files step-*.pt in `folder`, from the highest step to the lowest."""
    steps = {path.stem[5:]: path for path in folder.glob("step-*.pt")}
    return [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int, reverse=True)]


class CheckpointStore:
    """The checkpoints of one run directory. Only rank 0 reads and writes files.

    A checkpoint is *good* if `read_state` can read it, and *damaged* if not.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        keep_best: bool,
        world: World,
        check_state: Callable[[State], None],
    ) -> None:
        """folder: the folder of the checkpoints. keep_last: number of files step-*.pt to keep.

        keep_best: whether best.pt is written. check_state: raises ConfigError if a state is that of
        another run.
        """
        self.folder = folder
        self.place = os.path.realpath(folder)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.world = world
        self.check_state = check_state
        self.last_good: Path | None = None
        """The newest checkpoint that rank 0 wrote or restored; None before, and on other ranks."""
        self.best = Best()
        """The scores of the best checkpoint on disk; on rank 0 only."""
        self.failure: Exception | None = None
        """The error of the last write of a checkpoint; None if it did not fail."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """Wait until the last checkpoint is written, and end the writing thread."""
        self.wait()
        self._pool.shutdown()

    def restore(self, target: Checkpointable) -> bool:
        """Load the newest good checkpoint into `target`; return False if there is none.

        Every rank gets the state that rank 0 has read. Newer files, which are damaged, are renamed.
        Collective: every rank must call this.

        Raises:
            ConfigError: all checkpoints are damaged, `check_state` rejects the state of the newest
                good one, or this state does not fit `target`.
        """
        state = self.world.raise_on_any_rank(self._read_newest if self.world.is_main else dict)
        if state := broadcast_state(state, self.world):
            path = self.folder / f"step-{state['step']:08d}.pt"
            try:
                self.check_state(state)
                target.load_state_dict(state)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, ConfigError | torch.OutOfMemoryError):
                    raise
                text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                raise ConfigError(
                    f"{path} holds something else than the state of this run ({text}): remove it,"
                    " and the next launch uses the checkpoint before it"
                ) from error
            logger.info("resumed from %s (epoch %d, step %d)", path, state["epoch"], state["step"])
        return bool(state)

    def adopt(self, state: State) -> None:
        """Go on from `state`, which was not read from a file of this store."""
        self.best = best_of(state)
        self.last_good = next(iter(step_files(self.folder)), None) if self.world.is_main else None

    def _read_newest(self) -> State:
        """Return the state in the newest good checkpoint, or {} if there is no checkpoint.

        Newer files, which are damaged, are renamed. Raises ConfigError if all files are damaged.
        """
        paths = step_files(self.folder)
        for number, path in enumerate(paths):
            try:
                state = read_state(path)
                if state["step"] != int(path.stem[5:]):
                    raise DamagedCheckpointError(f"has the state of step {state['step']}")
            except DamagedCheckpointError as error:
                logger.warning("checkpoint %s %s: trying the checkpoint before it", path, error)
                continue
            # because `keep_last` would count the damaged files, and delete good ones instead
            for damaged in paths[:number]:
                with suppress(OSError):
                    damaged.rename(damaged.with_name(f"{damaged.name}.damaged"))
            self.last_good = path
            self.best = best_of(state)
            return state
        if paths:
            raise ConfigError(
                f"none of the {len(paths)} checkpoints in {self.folder} is usable: put a good"
                " checkpoint there, or set resume=never to start from step 0 (the old directory is"
                " renamed)"
            )
        return {}

    def save(self, source: Checkpointable, *, is_best: bool = False) -> None:
        """Copy the state of `source` to the CPU, and write the copy to a file in the background.

        If `is_best` and `keep_best`, also write best.pt. Rank 0 first waits for the save before
        this one. Collective: every rank must call this.
        """
        state = source.state_dict()
        if self.world.is_main:
            self.wait()
            self._pending = self._pool.submit(self._write, copied(state), is_best)

    def rehearse(self, source: Checkpointable) -> None:
        """Check, before the first step, that the state of `source` can be saved and read again.

        Collective: every rank must call this.

        Raises:
            ConfigError: a part, for example of a model of the user, cannot be in a checkpoint.
        """
        state = copied(source.state_dict())
        name = first_nonfinite(state["model"])
        require(
            name is None,
            f"{name} of the model is infinite or NaN before the first step, and no checkpoint has"
            " such values: compute it in forward, or use register_buffer(…, persistent=False)",
        )
        try:
            check_readable(state)
        except DamagedCheckpointError as error:
            raise ConfigError(
                f"no checkpoint of this run could be read again, because it {error}: {PLAIN_STATE}"
            ) from error

    def wait(self) -> None:
        """Wait until the last save is on disk, or has failed with a warning in the log."""
        if self._pending is not None:
            self._pending.result()

    def is_writing(self) -> bool:
        """Return whether a save is not yet on disk."""
        return self._pending is not None and not self._pending.done()

    def check_saved(self) -> None:
        """Wait for the last save, and check that it is on disk. Only rank 0 calls this.

        Raises:
            TransientError: the last save failed.
        """
        self.wait()
        if self.failure is not None:
            fix = "make space, or make the folder writable, and start the same command again"
            if not isinstance(self.failure, OSError):
                fix = PLAIN_STATE
            raise TransientError(
                f"{self.failure}, so the end of this training is not saved, and"
                f" {self.last_good_line()}: {fix}"
            )

    def last_good_line(self) -> str:
        """Return a clause for messages: which checkpoint is the last good one, if there is one."""
        if self.last_good is None or not self.last_good.exists():
            return "there is no good checkpoint"
        return f"the last good checkpoint is {self.last_good}"

    def shared_best(self) -> Best:
        """Wait for the last save, and return rank 0's `best` on every rank. Collective."""
        self.wait()
        return best_of(self.world.broadcast_object(self.best.state_dict()))

    def _check_place(self) -> None:
        if os.path.realpath(self.folder) != self.place:  # files of another run may be there
            raise OSError(
                f"{self.folder} is another folder now, by a link or a change of the current"
                " directory, and nothing is written there"
            )

    def _write_best(self, state: State, folder: Path) -> None:
        """Write best.pt if `keep_best`, and update `best`, which a failure leaves as it was."""
        try:
            if self.keep_best:
                write_file(self.folder / "best.pt", state, folder=folder)
            self.best = best_of(state)
        except OSError as error:
            logger.warning("%s; training continues", error)

    def _write(self, state: State, is_best: bool) -> None:
        """Write the checkpoint, and delete the oldest ones; a failure is logged and recorded."""
        path = self.folder / f"step-{state['step']:08d}.pt"
        try:
            check_readable(state)
            self._check_place()
            self.folder.mkdir(parents=True, exist_ok=True)  # the run directory may be deleted
            with held_folder(self.folder) as folder:
                self._check_place()  # from here on, a link that takes the name changes nothing
                remove_unfinished(folder)
                # best.pt comes first: a launch that is killed before it writes `path` repeats these
                # steps after a resume, and then writes best.pt again.
                if is_best:
                    self._write_best(state, folder)
                state |= self.best.state_dict()
                write_file(path, state, folder=folder)
                self.last_good = path
                self.failure = None
                for old in {*step_files(folder)[self.keep_last :]} - {folder / path.name}:
                    old.unlink(missing_ok=True)
        except DamagedCheckpointError as error:
            self._fail(DamagedCheckpointError(f"{path} was not written, because it {error}"))
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = error
        logger.warning("%s; training continues, %s", error, self.last_good_line())
