"""The checkpoints of one run: written in the background, the newest good one restored."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ddp_trainer.checkpoint.file import (
    DamagedCheckpointError,
    State,
    broadcast_state,
    read_state,
    write_file,
)
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.distributed.world import World

logger = logging.getLogger(__name__)


class Checkpointable(Protocol):
    """An object that can be saved and restored. Both methods are collective."""

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class CheckpointStore:
    """The checkpoints of one run directory. Rank 0 reads files, and writes in the background."""

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        keep_best: bool,
        world: World,
        check_state: Callable[[State], None] = lambda state: None,
    ) -> None:
        """check_state: raises ConfigError if a state belongs to another run than this one."""
        self.folder = folder
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.world = world
        self.check_state = check_state
        self.last_good: Path | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """Wait until the last checkpoint is written, and end the thread that writes."""
        self.wait()
        self._pool.shutdown()

    def paths(self) -> list[Path]:
        """Return the files from which a run can resume (step-*.pt, not best.pt), newest first."""
        steps = {path.stem[5:]: path for path in self.folder.glob("step-*.pt")}
        return [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int, reverse=True)]

    def restore(self, target: Checkpointable) -> bool:
        """Load the newest good checkpoint into `target`; return False if there is none.

        ConfigError if all checkpoints are damaged, or if the newest good one has another state than
        `target` needs. Rank 0 reads the file, and every rank gets the same state. Collective: every
        rank must call this.
        """
        state = self.world.raise_on_any_rank(self._read_newest if self.world.is_main else dict)
        if state := broadcast_state(state, self.world):
            try:
                self.check_state(state)
                target.load_state_dict(state)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, ConfigError | torch.OutOfMemoryError):
                    raise
                text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                path = self.folder / f"step-{state['step']:08d}.pt"
                raise ConfigError(
                    f"{path} holds something else than the state of this run ({text}): remove it,"
                    " and the next launch uses the checkpoint before it"
                ) from error
        return bool(state)

    def _read_newest(self) -> State:
        """Return the newest good state, {} without a file; rename newer, damaged files."""
        paths = self.paths()
        for number, path in enumerate(paths):
            try:
                state = read_state(path)
            except DamagedCheckpointError as error:
                logger.warning("checkpoint %s %s: trying the checkpoint before it", path, error)
                continue
            logger.info("resumed from %s (epoch %d, step %d)", path, state["epoch"], state["step"])
            for damaged in paths[:number]:  # else keep_last would count them, and delete good ones
                with suppress(OSError):
                    damaged.rename(damaged.with_name(f"{damaged.name}.damaged"))
            self.last_good = path
            return state
        if paths:
            raise ConfigError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be read: put a good"
                " checkpoint there, or set resume=never to start from step 0 (the old directory is"
                " renamed)"
            )
        return {}

    def save(self, source: Checkpointable, *, is_best: bool = False) -> None:
        """Copy the state of `source`, and write the copy to a file in the background.

        If `is_best` and `keep_best`, also write best.pt. Collective: every rank must
        call this.
        """
        state = source.state_dict()
        if self.world.is_main:
            self.wait()
            copy = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
            self._pending = self._pool.submit(self._write, copy, is_best and self.keep_best)

    def wait(self) -> None:
        """Return once the last save is on disk, or has failed with a warning."""
        if self._pending is not None:
            self._pending.result()

    def _write(self, state: State, is_best: bool) -> None:
        path = self.folder / f"step-{state['step']:08d}.pt"
        best = self.folder / "best.pt"
        try:
            self.folder.mkdir(exist_ok=True)
            for leftover in self.folder.glob(".*.writing"):  # of a launch that was killed
                leftover.unlink()
            write_file(path, state, also=best if is_best else None)
            self.last_good = path
            for old in self.paths()[self.keep_last :]:
                if old != path:
                    old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "%s; training continues, the last good checkpoint is %s", error, self.last_good
            )
