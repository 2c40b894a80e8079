"""Sums over the shards of a global batch whose bits do not depend on the number of ranks.

Floating-point sums depend on the order of their additions. Here a binary tree over the V shards
fixes this order: the node [a, b) is the sum of the nodes [a, m) and [m, b), m = (a + b + 1) // 2. A
rank computes a contiguous run of shards, and with it the nodes inside of this run. Each rank then
completes one chunk of the elements, and sends it to the others; of two ranks, each completes all,
because that takes one exchange in place of two, of as many elements together. If the nodes of each
rank are one whole subtree, a rank sends 2·(W − 1)/W·n elements for W ranks, like a ring.

Source: Villa et al., Effects of Floating-Point Non-Associativity on Numerical Computations on
Massively Multithreaded Systems, 2009, which names a fixed tree as a remedy.
"""

from collections.abc import Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor

from ddp_trainer.distributed.world import World, wait, waiting

Node = tuple[int, int]
"""The first shard of a node of the tree, and the end, which is exclusive."""


def shards_of(rank: int, *, world_size: int, num_shards: int) -> range:
    """Return the shards that a rank computes; their numbers differ by at most one between ranks."""
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def samples_of(shards: range, *, num_shards: int, batch_size: int) -> list[range]:
    """Return for each of `shards` the positions of its samples in the global batch."""
    bounds = [shard * batch_size // num_shards for shard in (*shards, shards.stop)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def children(node: Node) -> tuple[Node, Node]:
    """Return the two nodes whose sum is `node`."""
    first, end = node
    middle = (first + end + 1) // 2
    return (first, middle), (middle, end)


def largest_nodes(shards: range, node: Node) -> list[Node]:
    """Return the largest nodes below `node` that are inside of `shards`, in order."""
    first, end = node
    if end <= shards.start or shards.stop <= first:
        return []
    if shards.start <= first and end <= shards.stop:
        return [node]
    return [found for child in children(node) for found in largest_nodes(shards, child)]


def merges(shard: int, shards: range, node: Node) -> int:
    """Return how many sums of two nodes, inside of `shards` and of `node`, end with `shard`."""
    first, end = node
    if end - first == 1:
        return 0
    left, right = children(node)
    below = merges(shard, shards, left if shard < left[1] else right)
    return below + (end == shard + 1 and first >= shards.start)


def push(sums: list[Tensor], summand: Tensor, merges: int) -> None:
    """Append the summand of a shard to the sums of earlier ones, and add up what it completes.

    With `merges` as above, `sums` ends as the sums of the `largest_nodes`, and has at most
    log2(V) + 1 entries more. `summand` may change.
    """
    for _ in range(merges):
        summand = sums.pop().add_(summand)
    sums.append(summand)


def chunks_of(vector: Tensor, world_size: int) -> Sequence[Tensor]:
    """Return the elements that each rank completes: its part; if there are two ranks, all."""
    return vector.tensor_split(world_size) if world_size > 2 else [vector] * world_size


class SumOverRanks:
    """A sum over all shards that ranks compute together, in two exchanges, while they go on.

    All ranks must create these objects, and call `gather` and then `result` of each, in one order.
    """

    def __init__(self, parts: Sequence[Tensor], world: World, *, num_shards: int) -> None:
        """Begin the sum. parts: the sums of this rank's `largest_nodes`, [n] each."""
        self.world = world
        self.root = (0, num_shards)
        self.total = torch.empty_like(parts[0])
        self.pieces = chunks_of(self.total, world.world_size)
        ranks = range(world.world_size)
        self.others = [rank for rank in ranks if rank != world.rank]
        runs = [shards_of(rank, world_size=len(ranks), num_shards=num_shards) for rank in ranks]
        nodes = [largest_nodes(shards, self.root) for shards in runs]
        chunks = [chunks_of(part, len(ranks)) for part in parts]
        by_rank = [
            torch.stack(own) if own[1:] else own[0][None] for own in zip(*chunks, strict=True)
        ]
        own = by_rank[world.rank]
        rows = [own.new_empty(len(found), own.shape[1]) for found in nodes]
        rows[world.rank] = own
        self.known = dict(zip(chain(*nodes), chain(*rows), strict=True))
        self.sent = [(by_rank[rank], rank) for rank in self.others]  # kept until it has arrived
        self.requests = world.begin_exchange(
            send=self.sent, receive=[(rows[rank], rank) for rank in self.others]
        )

    @waiting()
    def gather(self) -> None:
        """Complete this rank's chunk, and begin to send it to all ranks that do not have it."""
        wait(self.requests)
        piece = self.pieces[self.world.rank].copy_(complete(self.root, self.known))
        others = self.others if len(self.others) > 1 else []
        self.requests = self.world.begin_exchange(
            send=[(piece, rank) for rank in others],
            receive=[(self.pieces[rank], rank) for rank in others],
        )

    @waiting()
    def result(self) -> Tensor:
        """Return the sum, [n], with the same bits on every rank."""
        wait(self.requests)
        return self.total


def complete(node: Node, known: dict[Node, Tensor]) -> Tensor:
    """Return the sum of `node` from those of nodes below it, which change."""
    if node in known:
        return known[node]
    left, right = (complete(child, known) for child in children(node))
    return left.add_(right)
