"""All-reduce by hand around a ring: each rank communicates only with its two neighbours.

This strategy shows why the cost of an all-reduce hardly depends on the number W of ranks. In each
of 2·(W − 1) rounds, a rank sends one chunk of m/W of the m elements. So a rank sends 2·(W − 1)/W·m
elements in all, and receives as many at the same time.

Source: Dive into Deep Learning, "Parameter Servers", ring synchronization; Patarasuk and Yuan,
Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009 (doi
10.1016/j.jpdc.2008.09.002).
"""

import torch
from torch import Tensor

from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import GradientSync, flatten, unflatten


class RingSync(GradientSync):
    """Averages gradients by a reduce-scatter and an all-gather of point-to-point sends."""

    def before_step(self) -> None:
        gradients = self.gradients()
        flat = flatten(gradients)
        ring_all_reduce(flat, self.world)
        unflatten(flat.div_(self.world.world_size), gradients)


def ring_all_reduce(vector: Tensor, world: World) -> None:
    """Replace `vector`, [n] for any n, by its sum over ranks. Collective.

    The sum of an element is completed on one rank and copied to the others, so that all ranks get
    the same bits.
    """
    rank = world.rank
    world_size = world.world_size
    chunks = vector.tensor_split(world_size)
    spare = torch.empty_like(chunks[0])  # no chunk is longer than the first
    for turn in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - turn) % world_size]
        incoming = chunks[(rank - turn - 1) % world_size]
        is_reduce_scatter = turn < world_size - 1  # after it, rank r has the sum of chunk r + 1
        # the all-gather receives complete sums, which replace the chunk
        received = spare[: len(incoming)] if is_reduce_scatter else incoming
        world.exchange(
            send=[(outgoing, (rank + 1) % world_size)],
            receive=[(received, (rank - 1) % world_size)],
        )
        if is_reduce_scatter:
            incoming += received
