"""`World`: this rank and its collectives; and a mark that is set while this rank waits for others.

The code that calls a collective sets the mark, because a Python stack does not show such a wait:
DDP waits in C++, and with NCCL the host waits where it reads a collective's result. With NCCL the
host may also wait, without the mark, where it launches a kernel while the device's queue is full.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.registry import PluginError

T = TypeVar("T")
PASSED_ON = (ConfigError, TransientError, PluginError)  # errors of one rank that all ranks raise
Pairs = Iterable[tuple[Tensor, int]]
"""Tensors, each with the rank to which it is sent or from which it is received."""


class RoundEndedError(Exception):
    """The process group has ended: a rank was lost, or another process is about to join."""


class _Mark:
    """The mark and progress of the process, of which only the main thread calls collectives."""

    is_set = False
    progress = 0


def record_progress() -> None:
    """Record that this rank makes progress; a rank that does not for too long counts as stuck."""
    _Mark.progress += 1


def progress_count() -> int:
    """Return how many times `record_progress` was called."""
    return _Mark.progress


def is_waiting() -> bool:
    """Return whether this rank waits for other ranks now."""
    return _Mark.is_set


def set_waiting(value: bool) -> None:
    """Set or clear the mark, for a wait that begins and ends in callbacks; else use `waiting`."""
    _Mark.is_set = value


@contextmanager
def waiting() -> Iterator[None]:
    """Mark this rank as waiting for other ranks inside the context. Contexts may be nested.

    Use it around a collective, and around a read of its result from a GPU.
    """
    was_set = _Mark.is_set
    _Mark.is_set = True
    try:
        yield
    finally:
        _Mark.is_set = was_set


def wait(requests: Iterable[dist.Work]) -> None:
    """Wait for all `requests`, which `World.begin_exchange` has returned."""
    for request in requests:
        request.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This rank, the size of its process group, and the group's collectives.

    Every rank must call the methods that are marked as collective.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    num_threads: int
    group: dist.ProcessGroup | None = None
    """The process group of the package's own collectives; None for torch's default group.

    Code of a user has the default group for itself. If only some ranks call a collective there, it
    waits, and cannot be mistaken for a collective of the training.
    """

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the rank that writes files."""
        return self.rank == 0

    @waiting()
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by its elementwise sum over ranks, and return it. Collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    @waiting()
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the `tensor` of every rank, by rank; all have the same shape. Collective."""
        if self.world_size == 1 or not tensor.numel():
            return [tensor] * self.world_size
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor, group=self.group)
        return tensors

    @waiting()
    def all_gather_object(self, value: T) -> list[T]:
        """Return the `value` of every rank (a JSON value), by rank. Collective."""
        if self.world_size == 1:
            return [value]
        text = json.dumps(value).encode()
        longest = int(max(self.all_gather(torch.tensor([len(text)], device=self.device))))
        padded = self._to_tensor(text.ljust(longest))  # JSON ignores spaces at its end
        return [json.loads(tensor.cpu().numpy().tobytes()) for tensor in self.all_gather(padded)]

    def broadcast_object(self, value: T, *, source: int = 0) -> T:
        """Return the `value` (a JSON value) of rank `source`. Collective."""
        return self.all_gather_object(value)[source]

    @waiting()
    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Return the `tensor` of rank `source`, on the device of this rank's `tensor`. Collective.

        `tensor` must be contiguous. It is overwritten if it is on the device of this rank.
        """
        if self.world_size == 1 or not tensor.numel():
            return tensor
        sent = tensor.to(self.device)
        dist.broadcast(sent, group_src=source, group=self.group)
        return tensor if self.rank == source else sent.to(tensor.device)

    @waiting()
    def broadcast_bytes(self, data: bytes, *, source: int = 0) -> bytes:
        """Return the `data` of rank `source`, of any length. Collective."""
        length = self.broadcast_object(len(data), source=source)
        if not length:
            return b""
        buffer = self._to_tensor(data if self.rank == source else bytes(length))
        return self.broadcast(buffer, source=source).cpu().numpy().tobytes()

    @waiting()
    def exchange(self, *, send: Pairs, receive: Pairs) -> None:
        """Send tensors to ranks and receive tensors from ranks at once, and wait for all of them.

        send, receive: pairs of a tensor and the other rank; empty tensors are left out.
        """
        wait(self.begin_exchange(send=send, receive=receive))

    def begin_exchange(self, *, send: Pairs, receive: Pairs) -> list[dist.Work]:
        """Begin an `exchange`; the caller must `wait` for the result."""
        # Receives are posted first, because only then gloo sends and receives at the same time
        # (201 ms in place of 383 ms for 22 MB in each direction over 1 Gbit/s).
        operations = [
            dist.P2POp(function, tensor, group=self.group, group_peer=rank)
            for function, pairs in ((dist.irecv, receive), (dist.isend, send))
            for tensor, rank in pairs
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def raise_on_any_rank(self, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``, or raise on all ranks the error that it raises on any. Collective.

        Only `PASSED_ON` errors are passed on to others.

        The raised error is that of the lowest failing rank. Its message names that rank, unless
        that rank is rank 0 or all ranks fail with the same error.
        """
        result = None
        failure = None
        try:
            result = attempt()
        except PASSED_ON as error:
            failure = [[isinstance(error, kind) for kind in PASSED_ON].index(True), str(error)]
        failures = self.all_gather_object(failure)
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, text = failure
                is_common = failures.count(failure) == self.world_size
                raise PASSED_ON[kind](text if rank == 0 or is_common else f"rank {rank}: {text}")
        return result  # type: ignore[return-value]  # attempt() returned it

    def _to_tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
