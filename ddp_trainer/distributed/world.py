"""`World`: this rank, and the collectives of its process group."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.distributed.waiting import waiting

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This rank, the size of its process group, and the group's collectives.

    Every rank must call a collective.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    num_threads: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the rank that writes files."""
        return self.rank == 0

    @waiting()
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum of `tensor` over ranks, in place. Collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    @waiting()
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's `tensor` (of one shape), by rank. Collective."""
        if self.world_size == 1 or not tensor.numel():
            return [tensor] * self.world_size
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor)
        return tensors

    @waiting()
    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's `value` (a JSON value), by rank. Collective."""
        if self.world_size == 1:
            return [value]
        text = json.dumps(value).encode()
        longest = int(max(self.all_gather(torch.tensor([len(text)], device=self.device))))
        padded = self._to_tensor(text.ljust(longest))  # JSON ignores spaces at its end
        return [json.loads(tensor.cpu().numpy().tobytes()) for tensor in self.all_gather(padded)]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` (a JSON value). Collective."""
        return self.all_gather_object(value)[0]

    @waiting()
    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Tensor:
        """Return rank `source`'s `tensor`, maybe in place; it must be contiguous. Collective."""
        if self.world_size == 1 or not tensor.numel():
            return tensor
        sent = tensor.to(self.device)
        dist.broadcast(sent, src=source)
        return tensor if self.rank == source else sent.to(tensor.device)

    @waiting()
    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's `data`, of any length. Collective."""
        length = self.broadcast_object(len(data))
        if not length:
            return b""
        buffer = self._to_tensor(data if self.is_main else bytes(length))
        return self.broadcast(buffer).cpu().numpy().tobytes()

    def raise_on_any_rank(self, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``, or raise on all ranks the error that it raises on one. Collective.

        Only ConfigError and TransientError are passed on to other ranks.

        The raised error is that of the lowest failing rank. Its message names that rank, unless
        that rank is rank 0 or all ranks fail with the same error.
        """
        result = None
        failure = None
        try:
            result = attempt()
        except (ConfigError, TransientError) as error:
            failure = [isinstance(error, TransientError), str(error)]
        failures = self.all_gather_object(failure)
        for rank, found in enumerate(failures):
            if found is not None:
                is_transient, message = found
                is_everywhere = failures.count(found) == self.world_size
                kind = TransientError if is_transient else ConfigError
                raise kind(message if rank == 0 or is_everywhere else f"rank {rank}: {message}")
        return result  # type: ignore[return-value]  # attempt() returned it

    def _to_tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
