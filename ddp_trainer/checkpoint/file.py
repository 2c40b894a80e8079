"""One checkpoint file: what ``torch.save`` writes (read it with ``torch.load(path, weights_only=True)``), then `MAGIC`
and the SHA-256 of all that precedes it, which reveals truncation and any flipped bit."""

import hashlib
import io
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import IO, Any, cast

import torch

from ddp_trainer.distributed.files import fsync_directory

logger = logging.getLogger(__name__)

MAGIC = b"ddp_trainer/1 sha256 "
TRAILER_BYTES = len(MAGIC) + 32

State = dict[str, Any]


class DamagedCheckpointError(Exception):
    """The file is not what was written; the message says how."""


class _Hashing(io.RawIOBase):
    """A file that is hashed while it is written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_file(path: Path, state: State, *, also: Path | None = None) -> None:
    """Write `state` to `path`, and to `also`, so that at any moment the old file or the new one is there, complete.

    `also` is replaced first: a kill between the two loses neither, because the step is then repeated.

    Raises:
        OSError: the disk is full, read-only or over its quota; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "wb") as file:
            hashing = _Hashing(file)
            torch.save(state, cast(IO[bytes], hashing))
            file.write(MAGIC + hashing.sha256.digest())
            file.flush()
            os.fsync(file.fileno())
        if also is not None:
            try_link(temporary, also)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} was not written: {error}") from error


def try_link(source: Path, path: Path) -> None:
    """Make `path` a hard link to `source`, or a copy without hard links; a failure is a warning."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        logger.warning("%s was not written (%s); training continues", path, error)


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
        raise DamagedCheckpointError(
            f"does not end with a checksum ({len(data)} bytes): truncated, or not written by this program"
        )
    if hashlib.sha256(memoryview(data)[:-TRAILER_BYTES]).digest() != data[-32:]:
        raise DamagedCheckpointError("does not match its checksum: altered after it was written")
    return data


def parse(data: bytes) -> State:
    """Return the state in `data`; builtins and tensors only, so that nothing in a file can run.

    Raises:
        DamagedCheckpointError: it holds anything else.
    """
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise DamagedCheckpointError(f"does not load ({str(error).splitlines()[0]})") from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise DamagedCheckpointError("is not a checkpoint of ddp_trainer: the key step is missing")
    return state
