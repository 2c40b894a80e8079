"""A key–value store over the ranks of a process group: push adds up values at a key's owner, pull
copies them.

It teaches that the pattern ``push(key, gradient); pull(key)`` hides which ranks communicate: the
caller names no rank.

Source: Dive into Deep Learning, "Parameter Servers", key–value stores; Li et al., Scaling
Distributed Machine Learning with the Parameter Server, 2014 (OSDI).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import exchange


class KeyValueStore:
    """Tensors by key, each owned by one of the first `num_servers` ranks. All methods but `owned`
    are collective.
    """

    def __init__(self, world: World, *, num_servers: int) -> None:
        self.world = world
        self.num_servers = num_servers
        self.others = [rank for rank in range(world.world_size) if rank != world.rank]
        self.owner: dict[str, int] = {}

    def init(self, values: dict[str, Tensor]) -> None:
        """Choose each key's owner so that owners have similar numbers of elements, and broadcast
        `values` of rank 0.
        """
        load = [0] * self.num_servers
        for key, value in sorted(values.items(), key=lambda item: (-item[1].numel(), item[0])):
            self.owner[key] = load.index(min(load))
            load[self.owner[key]] += value.numel()
            self.world.broadcast(value.detach())

    def owned(self, key: str) -> bool:
        """Return whether this rank owns `key`."""
        return self.owner[key] == self.world.rank

    def push(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send each of `values` to the rank that owns its key. Return the sums over ranks for the
        keys of this rank.
        """
        parts: dict[str, dict[int, Tensor]] = {}
        operations = []
        for key, value in values.items():
            if self.owned(key):
                parts[key] = {
                    rank: torch.empty_like(value, memory_format=torch.contiguous_format)
                    for rank in self.others
                }
                operations += [
                    dist.P2POp(dist.irecv, part, rank) for rank, part in parts[key].items()
                ]
            else:
                operations.append(dist.P2POp(dist.isend, value.contiguous(), self.owner[key]))
        exchange(operations)
        sums = {key: torch.zeros_like(values[key]) for key in parts}
        for key, received in parts.items():
            for rank in range(self.world.world_size):  # the same order on every owner
                sums[key] += received.get(rank, values[key])
        return sums

    def pull(self, values: dict[str, Tensor]) -> None:
        """Replace each tensor in `values`, in place, by the value on the rank that owns its key."""
        operations = []
        received = {}
        for key, value in values.items():
            if self.owned(key):
                operations += [
                    dist.P2POp(dist.isend, value.contiguous(), rank) for rank in self.others
                ]
            else:
                received[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
                operations.append(dist.P2POp(dist.irecv, received[key], self.owner[key]))
        exchange(operations)
        for key, value in received.items():
            values[key].copy_(value)
