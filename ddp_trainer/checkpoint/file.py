"""One checkpoint file: what ``torch.save`` writes (read it with ``torch.load(path, weights_only=True)``), then `MAGIC`
and the SHA-256 of all that precedes it, which reveals truncation and any flipped bit."""

import hashlib
import io
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from ddp_trainer.distributed.files import replace_file

logger = logging.getLogger(__name__)

MAGIC = b"ddp_trainer/1 sha256 "
TRAILER_BYTES = len(MAGIC) + 32

State = dict[str, Any]


class DamagedCheckpointError(Exception):
    """The file is not what was written; the message says how."""


def write_file(path: Path, state: State, *, also: Path | None = None) -> None:
    """Write `state` to `path`, and to `also`, so that at any moment the old file or the new one is there, complete.

    `also` is replaced first: a kill between the two loses neither, because the step is then repeated.
    OSError if the disk is full, read-only or over its quota; `path` is then as it was.
    """
    try:
        with replace_file(path) as file:
            torch.save(state, file)
            file.seek(0)
            file.write(MAGIC + hashlib.file_digest(file, "sha256").digest())
            file.flush()
            os.fsync(file.fileno())
            if also is not None:
                try_link(Path(file.name), also)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # a rename is durable only then
        finally:
            os.close(directory)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
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
    """Return the content of the checkpoint file `path`; DamagedCheckpointError if its checksum does not match."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"cannot be read ({error})") from error
    if data[-TRAILER_BYTES:-32] != MAGIC:
        size = f"{len(data)} bytes"
        raise DamagedCheckpointError(f"does not end with a checksum ({size}): truncated, or not written by ddp_trainer")
    if hashlib.sha256(memoryview(data)[:-TRAILER_BYTES]).digest() != data[-32:]:
        raise DamagedCheckpointError("does not match its checksum: altered after it was written")
    return data


def parse(data: bytes) -> State:
    """Return the state in `data`; DamagedCheckpointError unless it is builtins and tensors, so that nothing can run."""
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise DamagedCheckpointError(f"does not load ({str(error).splitlines()[0]})") from error
    if not isinstance(state, dict) or not all(isinstance(state.get(key), int) for key in ("step", "epoch")):
        raise DamagedCheckpointError("is not a checkpoint of ddp_trainer: the key step or epoch is missing")
    return state
