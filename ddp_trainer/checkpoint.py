"""Checkpoints that a crash cannot lose: written aside, checksummed, renamed, found again newest good first.

A file is what ``torch.save`` writes (read it with ``torch.load(path, weights_only=True)``) followed by a trailer
of `MAGIC` and the SHA-256 of all that precedes it, which tells truncation and any flipped bit.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self, cast

import torch

from ddp_trainer.config import CheckpointConfig, ConfigError, Resume
from ddp_trainer.distributed import World
from ddp_trainer.files import fsync_directory

logger = logging.getLogger(__name__)

MAGIC = b"ddp_trainer/1 sha256 "
TRAILER_BYTES = len(MAGIC) + 32

State = dict[str, Any]


class Checkpointable(Protocol):
    """What can be saved: state in, state out. Both are collective."""

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class DamagedCheckpointError(Exception):
    """The file is not what was written; the message says how."""


# --- one file -----------------------------------------------------------------------------------


class _Hashing(io.RawIOBase):
    """A file that is hashed on its way to disk."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_file(path: Path, state: State) -> None:
    """Write `state` to `path` so that at any moment the old file or the new one is there, whole.

    Raises:
        OSError: the disk is full, read-only or over its quota; `path` is as it was.
    """
    aside = path.with_name(f".{path.name}.writing")
    try:
        with open(aside, "wb") as file:
            hashing = _Hashing(file)
            torch.save(state, cast(IO[bytes], hashing))
            file.write(MAGIC + hashing.sha256.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        fsync_directory(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        aside.unlink(missing_ok=True)
        raise OSError(f"{path} was not written: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of the checkpoint file `path` after checking its checksum.

    Raises:
        DamagedCheckpointError: it is truncated, altered, or not a checkpoint.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"cannot be read ({error})") from error
    if data[-TRAILER_BYTES:-32] != MAGIC:
        raise DamagedCheckpointError(f"has no checksum at its end, {len(data)} bytes in: truncated or foreign")
    if hashlib.sha256(memoryview(data)[:-TRAILER_BYTES]).digest() != data[-32:]:
        raise DamagedCheckpointError("does not match its checksum: altered after it was written")
    return data


def parse(data: bytes) -> State:
    """Return the state in `data`; builtins and tensors only, so that nothing in a file can run.

    Raises:
        DamagedCheckpointError: it holds anything else.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise DamagedCheckpointError(f"does not load ({str(error).splitlines()[0]})") from error


# --- a run's files ------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run directory. Rank 0 reads and writes files; writing happens in the background.

    Use as a context manager: leaving it waits for the last write.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, *, world: World, resume: Resume) -> None:
        self.folder, self.config, self.world, self.resume = folder, config, world, resume
        self.last_good: Path | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()
        self._pool.shutdown()

    def paths(self) -> list[Path]:
        """Return the step checkpoints on disk, newest first."""
        found = [path for path in self.folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", path.name)]
        return sorted(found, key=lambda path: int(path.stem[5:]), reverse=True)

    def restore(self, target: Checkpointable) -> bool:
        """Load the newest good checkpoint into `target`; return False if there is none.

        Rank 0 reads it and every rank gets the same bytes. Collective: every rank must call this.

        Raises:
            ConfigError: resume=must found none, or all of them are damaged.
        """
        data = self.world.together(self._read_newest) if self.world.is_main else self.world.together(bytes)
        data = self.world.broadcast_bytes(data)
        if not data:
            return False
        target.load_state_dict(parse(data))
        return True

    def _read_newest(self) -> bytes:
        paths = self.paths()
        for path in paths:
            try:
                data = read_bytes(path)
                parse(data)
            except DamagedCheckpointError as error:
                logger.warning("checkpoint %s %s: trying the one before it", path, error)
                continue
            logger.info("resuming from %s", path)
            self.last_good = path
            return data
        if paths:
            raise ConfigError(
                f"none of the {len(paths)} checkpoints in {self.folder} can be read: put a good one there, "
                "or set resume=never to start afresh (the old directory is moved aside)"
            )
        if self.resume is Resume.must:
            raise ConfigError(
                f"resume=must and {self.folder} has no checkpoint: check name and output_dir, or use resume=auto"
            )
        return b""

    def save(self, source: Checkpointable, *, is_best: bool = False) -> None:
        """Take a snapshot of `source` and write it in the background. Collective: every rank must call this."""
        state = source.state_dict()
        if not self.world.is_main:
            return
        self.wait()
        snapshot = _to_host(state)
        self._pending = self._pool.submit(self._write, snapshot, is_best)

    def wait(self) -> None:
        """Return once the last save is on disk, or has failed and said so."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(self, state: State, is_best: bool) -> None:
        path = self.folder / f"step-{state['step']:08d}.pt"
        try:
            self.folder.mkdir(exist_ok=True)
            write_file(path, state)
        except OSError as error:
            logger.warning("%s; training goes on, the last good checkpoint is %s", error, self.last_good)
            return
        self.last_good = path
        try:
            if is_best and self.config.keep_best:
                self._keep_as_best(path)
            for old in self.paths()[self.config.keep_last :]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s is written, but not all around it (%s); training goes on", path, error)

    def _keep_as_best(self, path: Path) -> None:
        aside, best = self.folder / ".best.pt.writing", self.folder / "best.pt"
        aside.unlink(missing_ok=True)
        try:
            try:
                os.link(path, aside)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, aside)
            os.replace(aside, best)
        finally:
            aside.unlink(missing_ok=True)
        fsync_directory(self.folder)


def _to_host(value: Any) -> Any:
    """Return a deep copy with every tensor on the CPU, apart from the one that training goes on changing."""
    return _map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            return change(value)
        case dict():
            return {key: _map_tensors(item, change) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_map_tensors(item, change) for item in value)
        case _:
            return value
