"""A checkpoint file: the output of ``torch.save`` (read it with ``torch.load(path,
weights_only=True)``), then `MAGIC` and the SHA-256 of that output, which reveals truncation and any
flipped bit.
"""

import hashlib
import io
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ddp_trainer.distributed.world import World
from ddp_trainer.files import replace_file

logger = logging.getLogger(__name__)

MAGIC = b"ddp_trainer/1 sha256 "
TRAILER_BYTES = len(MAGIC) + 32
CHUNK_BYTES = 2**20

State = dict[str, Any]


class DamagedCheckpointError(Exception):
    """The file is not a complete, unchanged checkpoint; the message gives the reason."""


def write_file(path: Path, state: State, *, also: Path | None = None) -> None:
    """Write `state` to `path` and `also`. After a crash, each has its old content or its new.

    `also` is replaced before `path`. If this process ends between the two, the next launch resumes
    from an older checkpoint, trains the same steps again, and writes both files again. OSError if
    the disk is full, read-only or over its quota; `path` is then unchanged.
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
            os.fsync(directory)  # a rename is durable only after this
        finally:
            os.close(directory)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise OSError(f"{path} was not written: {error}") from error


def try_link(source: Path, path: Path) -> None:
    """Make `path` a hard link to `source`, or a copy if that fails; if both fail, log a warning."""
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


def read_state(path: Path) -> State:
    """Return the state in the checkpoint file `path`, without holding it in memory twice.

    Raises DamagedCheckpointError if the file cannot be read, its checksum is wrong, or an object,
    which could run code, is neither a builtin nor a tensor.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TRAILER_BYTES))
            trailer = file.read()
            if trailer[:-32] != MAGIC:
                raise DamagedCheckpointError(
                    f"does not end with a checksum ({size} bytes): the file is truncated, or was"
                    " not written by ddp_trainer"
                )
            file.seek(0)
            digest = hashlib.sha256()
            end = size - TRAILER_BYTES
            for start in range(0, end, CHUNK_BYTES):
                digest.update(file.read(min(CHUNK_BYTES, end - start)))
            if digest.digest() != trailer[-32:]:
                raise DamagedCheckpointError(
                    "does not match its checksum: the file was altered after it was written"
                )
            return parse(file)
    except OSError as error:
        raise DamagedCheckpointError(f"cannot be read ({error})") from error


def parse(file: BinaryIO) -> State:
    """Return the state in `file`; DamagedCheckpointError if it is none, with step and epoch."""
    file.seek(0)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise DamagedCheckpointError(f"does not load ({str(error).splitlines()[0]})") from error
    if not isinstance(state, dict) or not all(
        isinstance(state.get(key), int) for key in ("step", "epoch")
    ):
        raise DamagedCheckpointError(
            "is not a checkpoint of ddp_trainer: the key step or epoch is missing"
        )
    return state


def broadcast_state(state: State, world: World) -> State:
    """Return rank 0's `state` on every rank; that of the other ranks is ignored.

    Tensors are sent one by one, not as a second copy of the whole state, and arrive contiguous, on
    the CPU. Collective: every rank must call this.
    """
    if world.world_size == 1 or not world.broadcast_object(bool(state)):
        return state if world.is_main else {}
    outline = io.BytesIO()
    if world.is_main:
        torch.save(tree_map_only(Tensor, lambda tensor: tensor.to("meta"), state), outline)
    outline = io.BytesIO(world.broadcast_bytes(outline.getvalue()))

    def transfer(tensor: Tensor) -> Tensor:
        tensor = (
            tensor.contiguous() if world.is_main else torch.empty(tensor.shape, dtype=tensor.dtype)
        )
        return world.broadcast(tensor)

    return tree_map_only(Tensor, transfer, state if world.is_main else parse(outline))
