"""All-reduce by hand around a ring: each rank communicates only with its two neighbours.

It teaches why the cost of an all-reduce hardly depends on the number W of ranks: each of the 2·(W −
1) rounds moves one chunk of m/W of the m elements, so a rank sends 2·(W − 1)/W·m elements in all,
and receives as many at the same time.

Source: Dive into Deep Learning, "Parameter Servers", ring synchronization; Patarasuk and Yuan,
Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009 (doi
10.1016/j.jpdc.2008.09.002).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.sync.base import GradientSync, exchange, flatten, unflatten


class RingSync(GradientSync):
    """Averages gradients by a reduce-scatter and an all-gather of point-to-point sends."""

    def before_step(self) -> None:
        gradients = self.gradients()
        flat = flatten(gradients)
        ring_all_reduce(flat, rank=self.world.rank, world_size=self.world.world_size)
        unflatten(flat.div_(self.world.world_size), gradients)


def ring_all_reduce(vector: Tensor, *, rank: int, world_size: int) -> None:
    """Replace `vector`, [n] for any n, by its sum over ranks. Collective: every rank must call
    this.

    Every element is summed on one rank and copied to the others, so all end with the same bits.
    """
    chunks = vector.tensor_split(world_size)
    spare = torch.empty_like(chunks[0])  # no chunk is longer than the first
    for turn in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - turn) % world_size]
        incoming = chunks[(rank - turn - 1) % world_size]
        is_reduce_scatter = turn < world_size - 1  # after it, rank r has the sum of chunk r + 1
        # an all-gather copies sums
        received = spare[: len(incoming)] if is_reduce_scatter else incoming
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
        exchange([receive, dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size)])
        if is_reduce_scatter:
            incoming += received
