"""A training step whose result has the same bits at any number of ranks: `shards=V`.

The global batch is split into V shards, whatever the number of ranks is. A shard has a forward and
a backward pass of its own, random numbers of its own, and BatchNorm statistics of its own. What the
shards add is summed by one fixed tree, see `ddp_trainer.sync.shards`.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.data.loaders import Batch
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.sync.buffers import (
    flatten_buffers,
    floating_buffers,
    restore_buffers,
)
from ddp_trainer.sync.shards import (
    SumOverRanks,
    merges,
    push,
    samples_of,
    shards_of,
)
from ddp_trainer.training.metrics import MetricSums
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.run import Observer, TrainingRun
from ddp_trainer.training.step import TrainStep

BUCKET_BYTES = 4 * 2**20
"""The minimum size of a bucket: of gradients that ranks exchange together."""
BUCKETS_AHEAD = 2
"""How many sums over ranks have begun before the second exchange of an earlier one begins."""


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256, in hex digits, of the bytes of all parameters and buffers of `model`."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


class WeightsHash(Observer):
    """Adds the hash of the final weights to summary.json."""

    def summary_values(self, run: TrainingRun) -> dict[str, Any]:
        return {"weights_sha256": weights_sha256(run.model)}


def buckets_of(parameters: Sequence[Tensor]) -> Iterator[slice]:
    """Yield the places of parameters that have at least `BUCKET_BYTES` together, in order.

    The last slice has no end: it also has what is summed besides the gradients.
    """
    first = size = 0
    for place, parameter in enumerate(parameters, 1):
        size += parameter.nbytes
        if size >= BUCKET_BYTES and place < len(parameters):
            yield slice(first, place)
            first = place
            size = 0
    yield slice(first, None)


class ShardedStep(TrainStep):
    """A training step over the shards of a rank."""

    def __init__(self, *arguments: Any, num_shards: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        world = self.world
        self.num_shards = num_shards
        self.shards = shards_of(world.rank, world_size=world.world_size, num_shards=num_shards)
        batch_size = self.settings.global_batch_size
        samples = samples_of(self.shards, num_shards=num_shards, batch_size=batch_size)
        self.sizes = list(map(len, samples))
        self.mean_factor = 1 / batch_size
        self.buffer_world = replace(world, rank=0, world_size=1)  # they are equal on all ranks
        # Backward computes the gradients of the last layers first.
        self.parameters = [p for p in self.model.parameters() if p.requires_grad][::-1]
        self.orders = [sorted(range(p.ndim), key=p.stride, reverse=True) for p in self.parameters]
        """The dimensions of `parameters` in the order of memory, for example NHWC."""
        self.buckets = list(buckets_of(self.parameters))
        self.buffers = list(self.model.buffers())
        self.statistics = floating_buffers(self.model)
        self.sums_by_place: list[list[Tensor]] = [[] for _ in (*self.parameters, "others")]
        """For each of `parameters`, and then for what is summed besides gradients, see `push`."""
        self.running: list[SumOverRanks] = []
        """The sums of the buckets of this step that have begun."""
        self.merges = 0
        """How many sums the shard whose passes are running completes."""
        self.is_last = False
        """Whether this is the last shard of this rank."""
        self.ready: set[int] = set()
        """The places of the parameters whose gradients of this shard have been added."""
        for place, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self.gradient_ready, place))

    has_whole_sums = True

    @property
    def own_sums(self) -> Tensor:
        """Each rank has the whole sums; they are those of rank 0, so that they count once."""
        parts = [*[self.world.is_main] * 3, 1]  # each rank skips an update
        return self.sums.vector * self.sums.vector.new_tensor(parts)

    def split(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split a rank's share of a batch into its shards."""
        return list(zip(images.split(self.sizes), labels.split(self.sizes), strict=True))

    def accumulate(self, images: Tensor, labels: Tensor) -> Tensor:
        """Set each ``.grad`` to the mean over the global batch; return the mean loss on rank 0.

        Other ranks return 0. BatchNorm's statistics become the mean of those of the shards. While
        the backward pass of the last shard goes on, ranks exchange the gradients that are ready.
        """
        self.running = []
        for sums in self.sums_by_place:
            sums.clear()
        before = [buffer.clone() for buffer in self.buffers]
        for shard, part in zip(self.shards, self.split(images, labels), strict=True):
            if before:  # with empty lists the function fails
                torch._foreach_copy_(self.buffers, before)
            self.merges = merges(shard, self.shards, (0, self.num_shards))
            self.is_last = shard == self.shards[-1]
            self.ready = set()
            metrics = self.run_shard(shard, *part)  # calls `gradient_ready`
            for place, parameter in enumerate(self.parameters):
                if place not in self.ready:
                    self.push_gradient(place, torch.zeros_like(parameter))
            others = flatten([*(buffer.float() for buffer in self.statistics), metrics])
            push(self.sums_by_place[-1], others, self.merges)
        self.on_phase(Phase.gradient_sync)
        for bucket in self.buckets[len(self.running) :]:
            self.begin_bucket(bucket)
        for sum_ in self.running[-BUCKETS_AHEAD:]:
            sum_.gather()
        *totals, last = (sum_.result() for sum_ in self.running)
        size = sum(map(torch.numel, self.statistics))
        rest, statistics, sums = last.split([len(last) - size - 4, size, 4])
        parts: list[Tensor] = []
        for bucket, total in zip(self.buckets, [*totals, rest], strict=True):
            parts += total.split([parameter.numel() for parameter in self.parameters[bucket]])
        for parameter, order, part in zip(self.parameters, self.orders, parts, strict=True):
            back = sorted(range(len(order)), key=order.__getitem__)
            parameter.grad = part.view(parameter.permute(order).shape).permute(back)
        unflatten(statistics / self.num_shards, self.statistics)
        self.sums.vector += sums
        return sums[0] * float(self.world.is_main) / self.settings.global_batch_size

    def run_shard(self, shard: int, images: Tensor, labels: Tensor) -> Tensor:
        """Run forward and backward of a shard; return the values of its `MetricSums`, float32."""
        self.on_phase(Phase.forward)
        self.seed(f"shard {shard}")
        loss, loss_sum, logits = self.compute_loss(self.model, images, labels)
        sums = MetricSums(self.world.device)
        sums.add(loss_sum, logits, labels)
        self.on_phase(Phase.backward)
        loss.backward()
        return sums.vector.float()

    def push_gradient(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of this shard to the sums of its parameter."""
        push(self.sums_by_place[place], gradient.permute(self.orders[place]), self.merges)
        self.ready.add(place)

    def gradient_ready(self, place: int, parameter: Tensor) -> None:
        """Add a gradient; in the last shard, begin the sums of buckets in order, once complete."""
        if parameter.grad is not None:
            self.push_gradient(place, parameter.grad)
        parameter.grad = None
        while self.is_last and len(self.running) < len(self.buckets) - 1:
            bucket = self.buckets[len(self.running)]
            if not self.ready.issuperset(range(bucket.start, bucket.stop)):
                return
            self.begin_bucket(bucket)

    def begin_bucket(self, bucket: slice) -> None:
        """Begin the sum over ranks of the gradients in `bucket`."""
        parts = list(map(flatten, zip(*self.sums_by_place[bucket], strict=True)))
        self.running.append(SumOverRanks(parts, self.world, num_shards=self.num_shards))
        if len(self.running) > BUCKETS_AHEAD:
            self.running[-1 - BUCKETS_AHEAD].gather()

    def measure_statistics(
        self, model: nn.Module, batches: Iterable[Batch], reset: Callable[[], None]
    ) -> None:
        """Set the statistics of `model` to the mean of those of the shards. Collective."""
        parts = [self.split(batch.images, batch.labels) for batch in batches]
        sums: list[Tensor] = []
        for shard, own in zip(self.shards, zip(*parts, strict=True), strict=True):
            reset()
            for images, _ in own:
                with self.autocast():
                    model(images)
            root = (0, self.num_shards)
            push(sums, flatten_buffers(model), merges(shard, self.shards, root))
        total = SumOverRanks(sums, self.world, num_shards=self.num_shards)
        total.gather()
        restore_buffers(model, total.result() / self.num_shards)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"weights_sha256": weights_sha256(self.model)}
