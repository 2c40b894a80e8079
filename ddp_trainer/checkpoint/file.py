"""Writes, reads and broadcasts checkpoints.

A file has the output of ``torch.save``, then `MAGIC`, then the SHA-256 of that output. The checksum
shows whether the file was truncated or altered. ``torch.load(path, weights_only=True)`` can also
read the file, but does not compare the checksum.
"""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from ddp_trainer.checkpoint.contents import check_tensors, check_types
from ddp_trainer.config.errors import one_line
from ddp_trainer.distributed.world import World, record_progress
from ddp_trainer.files import check_archive, replace_file

MAGIC = b"ddp_trainer/1 sha256 "
TRAILER_BYTES = len(MAGIC) + 32
CHUNK_BYTES = 2**20
SYNC_BYTES = 2**26

State = dict[str, Any]


class DamagedCheckpointError(Exception):
    """A checkpoint file cannot be used; the message is the reason, to be written after the path."""


class SyncedFile:
    """A file that is on the disk up to the last `SYNC_BYTES`; each part of them is progress.

    So a slow disk does not look like one that has stopped, and the sync at the end is short.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.flush = file.flush
        self.digest = hashlib.sha256()
        """The checksum of all that was written."""
        self.unsynced = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write `data`, and return its number of bytes."""
        view = memoryview(data)
        for start in range(0, len(view), SYNC_BYTES):
            part = view[start : start + SYNC_BYTES]
            self.digest.update(part)
            self.unsynced += self.file.write(part)
            if self.unsynced >= SYNC_BYTES:
                self.file.flush()
                os.fdatasync(self.file.fileno())
                self.unsynced = 0
            record_progress()
        return len(view)


def write_file(path: Path, state: State, *, folder: Path | None = None) -> None:
    """Write `state` to `path`. After a crash, the file has either the old or the new content.

    folder: that of `path`, from `held_folder`.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    try:
        with replace_file((folder or path.parent) / path.name) as file:
            synced = SyncedFile(file)
            torch.save(state, cast(BinaryIO, synced))
            file.write(MAGIC + synced.digest.digest())
        directory = os.open(folder or path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # because a rename survives a power failure only after this
        finally:
            os.close(directory)
    except (OSError, RuntimeError) as error:
        # torch.save raises RuntimeError for a failed write, with the file's OSError as its context.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(cause, "strerror", None) or cause
        raise OSError(f"{path} was not written ({reason})") from error


def copied(state: State) -> State:
    """Return a copy of `state` on the CPU, with Python's numbers and texts in place of NumPy's."""

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        return value.item() if isinstance(value, np.generic) else value

    return tree_map(copy, state)


def check_readable(state: State) -> None:
    """Check that `read_state` could read a file with `state`, on the CPU; its values do not matter.

    Raises:
        DamagedCheckpointError: it could not, for example because of an object of another class.
    """
    try:
        check_tensors(state)
    except ValueError as error:
        raise DamagedCheckpointError(f"has content of a wrong type ({error})") from error
    parse(outline_of(state))


def outline_of(state: State) -> io.BytesIO:
    """Return a file with `state` in which the tensors have shapes and no data (meta tensors)."""
    outline = io.BytesIO()
    torch.save(tree_map_only(Tensor, lambda tensor: tensor.to("meta"), state), outline)
    outline.seek(0)
    return outline


def read_state(path: Path) -> State:
    """Return the state in the checkpoint file `path`, with tensors on the CPU.

    The checksum is computed in chunks, so that the content is in memory only once.

    Raises:
        DamagedCheckpointError: the file cannot be read, its checksum is missing or wrong, `parse`
            rejects its content, or a weight is infinite or NaN.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be read for ever
            raise DamagedCheckpointError("is not a regular file")
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
                record_progress()
            if digest.digest() != trailer[-32:]:
                raise DamagedCheckpointError(
                    "does not match its checksum: the file was altered after it was written"
                )
            state = parse(file)
        check_tensors(state)
        name = first_nonfinite(state.get("model"), state.get("ema"))
    except OSError as error:
        raise DamagedCheckpointError(f"cannot be read ({error})") from error
    except (ValueError, RuntimeError) as error:
        raise DamagedCheckpointError(f"has content of a wrong type ({one_line(error)})") from error
    if name:
        raise DamagedCheckpointError(f"has a weight that is infinite or NaN ({name})")
    return state


def first_nonfinite(*parts: Mapping[str, Any] | None) -> str | None:
    """Return the name of the first tensor with an infinite or NaN value; None if all are finite.

    parts: state dicts of models, or None; values that are not tensors are ignored.
    """
    for part in parts:
        for name, value in (part or {}).items():
            if not torch.is_tensor(value) or value.sum().isfinite():  # without a copy
                continue
            if not value.isfinite().all():  # else only the sum is too large
                return name
    return None


def parse(file: BinaryIO) -> State:
    """Return the state in `file`; DamagedCheckpointError unless it is a dict with step and epoch.

    The types of all entries are checked too, because the file may be from somebody else. With
    ``weights_only=True``, torch.load rejects objects that could run code when they are loaded.
    """
    try:
        check_archive(file)
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a file that nobody has checked may raise anything
        raise DamagedCheckpointError(f"does not load ({one_line(error)})") from error
    if not isinstance(state, dict) or not all(
        isinstance(state.get(key), int) for key in ("step", "epoch")
    ):
        raise DamagedCheckpointError(
            "is not a checkpoint of ddp_trainer: the key step or epoch is missing"
        )
    try:
        check_types(state)
    except ValueError as error:
        raise DamagedCheckpointError(f"has content of a wrong type ({error})") from error
    return state


def broadcast_state(state: State, world: World, *, source: int = 0) -> State:
    """Return the `state` of rank `source` on every rank; that of other ranks is ignored.

    Tensors are sent one by one, because serializing the whole state would need a second copy of it.
    The other ranks get contiguous tensors on the CPU. Collective: every rank must call this.
    """
    is_source = world.rank == source
    if world.world_size == 1 or not world.broadcast_object(bool(state), source=source):
        return state if is_source else {}
    outline = outline_of(state) if is_source else io.BytesIO()
    outline = io.BytesIO(world.broadcast_bytes(outline.getvalue(), source=source))

    def transfer(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous() if is_source else torch.empty(tensor.shape, dtype=tensor.dtype)
        return world.broadcast(tensor, source=source)

    return tree_map_only(Tensor, transfer, state if is_source else parse(outline))
