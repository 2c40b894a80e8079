"""A model of the time of a step, by strategy and number of ranks, from the measured costs of computing and of messages.

Source: Hockney, The Communication Challenge for MPP, 1994 (a message costs its latency, and its size over the
bandwidth); Li et al., PyTorch Distributed, 2020 (arXiv 2006.15704) for DDP's buckets and their overlap.
"""

import math
from dataclasses import dataclass

from ddp_trainer.config.sync import CommHook, DDPConfig
from ddp_trainer.performance.costs import Shape, wire_bytes

HOOKS = {"ddp": CommHook.none, "ddp, bf16 hook": CommHook.bf16, "ddp, powersgd": CommHook.powersgd}
STRATEGIES = (*HOOKS, "allreduce, flat", "allreduce, parameter", "ring", "parameter_server, 1")
MESSAGES = {CommHook.none: 1, CommHook.bf16: 1, CommHook.powersgd: 3}
"""All-reduces per bucket: PowerSGD sends the gradients that it does not compress, then one factor, then the other."""
MB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The measured times of a rank that does not communicate, in seconds, for a share of `batch` images."""

    batch: int
    shapes: list[Shape]
    """Of the parameters that need a gradient."""
    forward_backward: float
    per_image: float
    """How much longer forward and backward take with one more image."""
    other: float
    """The rest of a step: data, optimizer, Python."""
    ready: list[float]
    """When the gradient of each parameter is ready, counted from the beginning of forward."""
    copy: float
    """Copying all gradients into one vector and back."""
    divide: float
    """Dividing all gradients by the number of ranks."""
    add: float
    """Adding one vector of all gradients to another."""
    ddp_overhead: dict[str, float]
    """By strategy of `HOOKS`: how much longer forward and backward take inside DDP on one rank."""

    @property
    def size(self) -> float:
        """The bytes of all gradients."""
        return 4.0 * sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The cost of messages. Seconds, and bytes per second in each direction."""

    latency: float
    """Of one round of a collective."""
    bandwidth: float
    """Of a collective."""
    pair_latency: float
    """Of an exchange between two neighbours by point-to-point sends."""
    pair_bandwidth: float
    message: float = 0.0
    """The host's time for one point-to-point message among many."""
    collective_message: float = 0.0
    """The host's time for one collective, besides its latency."""
    interference: float = 0.0
    """How much longer computing takes for each byte that is all-reduced at the same time."""

    def all_reduce(self, size: float, world_size: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes around a ring of `world_size` ranks."""
        return 2 * (world_size - 1) * (self.latency + size / world_size / self.bandwidth)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted step of one strategy, in seconds."""

    strategy: str
    world_size: int
    step: float
    exposed: float
    """Communication that does not overlap with computing."""
    efficiency: float
    """The step of a single rank over this one; 1 is linear scaling."""


def predict(
    strategy: str, compute: Compute, network: Network, world_size: int, *, bucket_cap_mb: int = 25
) -> Prediction:
    """Return the predicted step of `strategy` on `world_size` ranks with `compute.batch` images each."""
    alone = compute.forward_backward + compute.other
    exposed = 0.0
    if world_size > 1:
        match strategy:
            case "ddp" | "ddp, bf16 hook" | "ddp, powersgd":
                exposed = exposed_by_ddp(compute, network, world_size, strategy=strategy, bucket_cap_mb=bucket_cap_mb)
            case "allreduce, flat":
                exposed = compute.copy + compute.divide + network.all_reduce(compute.size, world_size)
            case "allreduce, parameter":
                sizes = [4.0 * math.prod(shape) for shape in compute.shapes]
                exposed = compute.divide + len(sizes) * network.collective_message
                exposed += sum(network.all_reduce(size, world_size) for size in sizes)
            case "ring":
                part = compute.size / world_size / network.pair_bandwidth
                exposed = compute.copy + compute.divide + 2 * (world_size - 1) * (network.pair_latency + part)
                exposed += compute.add * (world_size - 1) / world_size
            case "parameter_server, 1":
                exposed = exposed_by_server(compute, network, world_size)
            case _:
                raise ValueError(f"there is no model of {strategy}")
    step = alone + exposed
    return Prediction(strategy=strategy, world_size=world_size, step=step, exposed=exposed, efficiency=alone / step)


def exposed_by_ddp(
    compute: Compute, network: Network, world_size: int, *, strategy: str = "ddp", bucket_cap_mb: int
) -> float:
    """Return how much longer a step takes with DDP, in seconds.

    It is the sum of DDP's own work, the slowdown of computing by the messages that overlap with it, and the messages
    that end after backward. A bucket is sent when its last gradient is ready and the bucket before it has arrived.
    """
    overhead = compute.ddp_overhead[strategy]
    backward_ends = compute.forward_backward + overhead
    stretch = backward_ends / compute.forward_backward
    sent = buckets(compute, HOOKS[strategy], bucket_cap_mb=bucket_cap_mb)
    size = sum(bucket for bucket, _ in sent)
    overlapped = size * (backward_ends - sent[0][1] * stretch) / network.all_reduce(size, world_size)
    slowdown = network.interference * min(overlapped, size - sent[-1][0])
    stretch *= 1 + slowdown / backward_ends
    backward_ends += slowdown
    more_messages = (MESSAGES[HOOKS[strategy]] - 1) * network.all_reduce(0, world_size)
    arrived = 0.0
    for bucket, ready in sent:
        arrived = max(arrived, ready * stretch) + network.all_reduce(bucket, world_size) + more_messages
    return overhead + slowdown + max(0.0, arrived - backward_ends)


def buckets(compute: Compute, hook: CommHook, *, bucket_cap_mb: int) -> list[tuple[float, float]]:
    """Return DDP's buckets as (bytes to send, seconds until ready), in the order in which they are sent."""
    config = DDPConfig(comm_hook=hook, bucket_cap_mb=bucket_cap_mb)
    cap = config.cap_mb(compute.size) * MB
    order = sorted(range(len(compute.shapes)), key=lambda index: compute.ready[index])
    result: list[tuple[float, float]] = []
    size, sent, ready = 0.0, 0.0, 0.0
    for index in order:
        size, ready = size + 4.0 * math.prod(compute.shapes[index]), compute.ready[index]
        sent += wire_bytes(config, compute.shapes[index])
        if size >= cap:
            result.append((sent, ready))
            size, sent = 0.0, 0.0
    return [*result, (sent, ready)] if size else result


def exposed_by_server(compute: Compute, network: Network, world_size: int) -> float:
    """Return the seconds of a push and a pull through the one link of a single server."""
    others = world_size - 1
    one_way = network.pair_latency + others * (
        compute.size / network.pair_bandwidth + len(compute.shapes) * network.message
    )
    return 2 * one_way + others * compute.add


def smallest_hiding_batch(compute: Compute, network: Network, world_size: int) -> int | None:
    """Return the smallest batch per rank whose forward and backward last as long as an all-reduce of all gradients.

    None if it would be a million images or more.
    """
    needed = network.all_reduce(compute.size, world_size)
    fixed = compute.forward_backward - compute.per_image * compute.batch
    if compute.per_image <= 0:
        return None
    batch = max(1, math.ceil((needed - fixed) / compute.per_image))
    return batch if batch < 1_000_000 else None
