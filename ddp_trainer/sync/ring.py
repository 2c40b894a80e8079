"""All-reduce by hand around a ring: each rank communicates only with its two neighbours.

Teaches why the cost of an all-reduce hardly depends on the number of ranks: each of the 2·(W − 1) rounds moves one
chunk of m/W elements, so a rank sends 2·(W − 1)/W·m in all, always in both directions at once.

Source: Dive into Deep Learning, "Parameter Servers", ring synchronization; Patarasuk and Yuan, Bandwidth Optimal
All-reduce Algorithms for Clusters of Workstations, 2009 (doi 10.1016/j.jpdc.2008.09.002).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.sync.base import GradientSync, exchange, flatten, unflatten


class RingSync(GradientSync):
    """Average gradients by a reduce-scatter and an all-gather of point-to-point sends."""

    def before_step(self) -> None:
        if self.world.world_size == 1:
            return
        gradients = self.gradients()
        flat = flatten(gradients)
        ring_all_reduce(flat, rank=self.world.rank, world_size=self.world.world_size)
        unflatten(flat.div_(self.world.world_size), gradients)


def ring_all_reduce(vector: Tensor, *, rank: int, world_size: int) -> None:
    """Replace `vector`, [n] for any n, by its sum over ranks. Collective: every rank must call this.

    Every element is summed on one rank and copied to the others, so all end with the same bits.
    """
    chunks = list(vector.tensor_split(world_size))
    spare = torch.empty_like(chunks[0])  # the first chunk is never the shortest
    for turn in range(world_size - 1):  # reduce-scatter: rank r ends with the sum of chunk r + 1
        outgoing, incoming = chunks[(rank - turn) % world_size], chunks[(rank - turn - 1) % world_size]
        received = spare[: len(incoming)]
        pass_on(outgoing, received, rank=rank, world_size=world_size)
        incoming += received
    for turn in range(world_size - 1):  # all-gather: sums travel on, replacing what is there
        outgoing, incoming = chunks[(rank + 1 - turn) % world_size], chunks[(rank - turn) % world_size]
        pass_on(outgoing, incoming, rank=rank, world_size=world_size)


def pass_on(outgoing: Tensor, incoming: Tensor, *, rank: int, world_size: int) -> None:
    """Send to the next rank while receiving from the one before; empty chunks are not sent."""
    receive = [dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size)] if len(incoming) else []
    send = [dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)] if len(outgoing) else []
    exchange([*receive, *send])
