"""The calculated cost of communication: the bytes that a strategy sends, and a model of the time of
its steps.

Source: Hockney, The Communication Challenge for MPP, 1994 (a message takes its latency plus its
size divided by the bandwidth); Li et al., PyTorch Distributed, 2020 (arXiv 2006.15704) for DDP's
buckets and their overlap.
"""

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ddp_trainer.config.sync import (
    AllReduceConfig,
    Bucket,
    CommHook,
    DDPConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    RingConfig,
    SyncConfig,
)

Shape = tuple[int, ...]

VARIANTS: dict[str, SyncConfig] = {
    "ddp": DDPConfig(),
    "ddp, bf16 hook": DDPConfig(comm_hook=CommHook.bf16),
    "ddp, fp16 hook": DDPConfig(comm_hook=CommHook.fp16),
    "ddp, powersgd": DDPConfig(comm_hook=CommHook.powersgd, powersgd_warmup_steps=2),
    "allreduce, flat": AllReduceConfig(bucket=Bucket.flat),
    "allreduce, parameter": AllReduceConfig(bucket=Bucket.parameter),
    "ring": RingConfig(),
    "parameter_server, 1": ParameterServerConfig(),
}
"""The configs of the strategies in the tables of benchmark and plan, by their name there."""


def sent_bytes(
    config: SyncConfig, shapes: list[Shape], *, world_size: int, num_state_tensors: int
) -> float | None:
    """Return how many bytes a rank sends in a step, as a mean over ranks, for float32 gradients of
    `shapes`.

    None for a strategy from a plug-in. num_state_tensors: how many tensors of a parameter's shape
    the optimizer keeps for each parameter: 1 for SGD with momentum, 2 for Adam.

    Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of
    Workstations, 2009 (doi 10.1016/j.jpdc.2008.09.002): an all-reduce over W ranks sends and
    receives (W - 1) / W of the bytes, twice.
    """
    size = 4.0 * sum(map(math.prod, shapes))
    match config:
        case SyncConfig(single_process=True):
            return 0.0
        case DDPConfig():
            size = sum(ddp_bytes(config, shape) for shape in shapes)
        case LocalSGDConfig(every_steps=steps):
            size *= (1 + num_state_tensors) / steps
        # to a server: pushed, and pulled from it
        case AllReduceConfig() | RingConfig() | ParameterServerConfig():
            pass
        case _:
            return None
    return 2 * (world_size - 1) / world_size * size


def ddp_bytes(config: DDPConfig, shape: Shape) -> float:
    """Return the number of bytes that DDP all-reduces for a float32 gradient of `shape`.

    Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019 (arXiv 1905.13727): a matrix is sent as
    two factors. torch sends factors only where they have less than half of the elements, and none
    in `powersgd_warmup_steps`.
    """
    match config.comm_hook:
        case CommHook.none:
            return 4.0 * math.prod(shape)
        case CommHook.fp16 | CommHook.bf16:
            return 2.0 * math.prod(shape)
        case CommHook.powersgd:
            rows = math.prod(shape[:1])
            columns = math.prod(shape[1:])
            factors = (rows + columns) * min(rows, columns, config.powersgd_rank)
            return 4.0 * (factors if 2 * factors < rows * columns else rows * columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The measured times of a rank that does not communicate, in seconds, for a share of `batch`
    images.
    """

    batch: int
    shapes: list[Shape]
    """The shapes of the parameters that need a gradient."""
    forward_backward: float
    per_image: float
    """How much longer forward and backward take with one more image."""
    other: float
    """The rest of a step: data, optimizer, Python."""
    ready: list[float]
    """When the gradient of each parameter is ready, counted from the beginning of forward."""
    copy: float
    """The time to copy all gradients into one vector and back. Dividing or adding them takes a
    tenth: not counted.
    """
    ddp_overhead: dict[str, float]
    """By communication hook: how much longer forward and backward take inside DDP on one rank."""

    @property
    def size(self) -> float:
        """The bytes of all gradients."""
        return 4.0 * sum(map(math.prod, self.shapes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The speed of a network: times in seconds, and a rank's bandwidth in bytes per second in each
    direction.
    """

    latency: float
    """The latency of one round of a collective."""
    bandwidth: float
    per_collective: float = 0.0
    """The host's time for each of many collectives, in addition to the latency."""

    def all_reduce(self, size: float, world_size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes around a ring of
        `world_size` ranks.
        """
        return 2 * (world_size - 1) * (self.latency + size / world_size / self.bandwidth)


def predict(strategy: str, compute: Compute, network: Network, world_size: int) -> dict[str, Any]:
    """Return the predicted step of a strategy of `VARIANTS`, in seconds, with `compute.batch`
    images on each rank.

    `exposed` is how much longer the step takes than the step of a single rank. `efficiency` is the
    time of a single rank's step divided by the time of this step; 1 is linear scaling.
    """
    all_reduce = network.all_reduce(compute.size, world_size)
    num_gradients = len(compute.shapes)
    match config := VARIANTS[strategy]:
        case _ if world_size == 1:
            exposed = 0.0
        case DDPConfig():
            exposed = exposed_by_ddp(config, compute, network, world_size)
        case AllReduceConfig(bucket=Bucket.parameter):
            more_messages = (num_gradients - 1) * network.all_reduce(0, world_size)
            exposed = all_reduce + more_messages + num_gradients * network.per_collective
        case AllReduceConfig() | RingConfig():
            exposed = compute.copy + all_reduce
        case _:  # one parameter server: all gradients of each other rank pass its link one by one
            exposed = 2 * (network.latency + (world_size - 1) * compute.size / network.bandwidth)
    alone = compute.forward_backward + compute.other
    timing = {"step": alone + exposed, "exposed": exposed, "efficiency": alone / (alone + exposed)}
    return {"strategy": strategy, "world_size": world_size, **timing}


def exposed_by_ddp(config: DDPConfig, compute: Compute, network: Network, world_size: int) -> float:
    """Return how many seconds longer a step takes with DDP than on a rank that does not
    communicate.

    This is the time from the end of forward and backward without DDP until the last bucket has
    arrived, and at least ``compute.ddp_overhead``. A bucket is sent when its last gradient is ready
    and the bucket before it has arrived.
    """
    overhead = compute.ddp_overhead[config.comm_hook.name]
    stretch = 1 + overhead / compute.forward_backward
    # PowerSGD sends the gradients that it does not compress, then one factor, then the other.
    more_messages = (
        2 * network.all_reduce(0, world_size) if config.comm_hook is CommHook.powersgd else 0.0
    )
    arrived = 0.0
    for size, ready in buckets(config, compute):
        arrived = (
            max(arrived, ready * stretch) + network.all_reduce(size, world_size) + more_messages
        )
    return max(overhead, arrived - compute.forward_backward)


def buckets(config: DDPConfig, compute: Compute) -> list[tuple[float, float]]:
    """Return DDP's buckets, in sending order, as (bytes to send, seconds from the start of forward
    until ready).
    """
    result: list[tuple[float, float]] = []
    size = 0.0
    sent = 0.0
    cap = config.cap_mb(compute.size) * 2**20
    for ready, shape in sorted(zip(compute.ready, compute.shapes, strict=True), key=itemgetter(0)):
        size += 4.0 * math.prod(shape)
        sent += ddp_bytes(config, shape)
        if size >= cap:
            result.append((sent, ready))
            size = 0.0
            sent = 0.0
    return [*result, (sent, max(compute.ready))] if size else result


def smallest_hiding_batch(compute: Compute, network: Network, world_size: int) -> int | None:
    """Return the smallest batch per rank whose forward and backward last as long as an all-reduce
    of all gradients.

    None if it would be a million images or more, or if a larger batch takes no longer.
    """
    if compute.per_image <= 0:
        return None
    missing = network.all_reduce(compute.size, world_size) - compute.forward_backward
    batch = max(1, compute.batch + math.ceil(missing / compute.per_image))
    return batch if batch < 1_000_000 else None
