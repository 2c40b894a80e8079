"""What a step takes on any number of ranks: the notes' t1 and t2 as a model of each strategy.

Source: the notes' t1 ≥ t2; Hockney, The Communication Challenge for MPP, 1994 (a message costs its latency and its
size over the bandwidth); Li et al., PyTorch Distributed, 2020 (arXiv 2006.15704) for buckets and their overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_trainer.config import CommHook, DDPConfig
from ddp_trainer.costs import product, wire_bytes

HOOKS = {"ddp": CommHook.none, "ddp, bf16 hook": CommHook.bf16, "ddp, powersgd": CommHook.powersgd}
STRATEGIES = (*HOOKS, "allreduce, flat", "allreduce, parameter", "ring", "parameter_server, 1")
MESSAGES = {CommHook.none: 1, CommHook.bf16: 1, CommHook.powersgd: 3}
"""All-reduces of a bucket: PowerSGD sends what it cannot compress, then one factor, then the other."""
MB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """What a rank does by itself. Seconds, for a share of `batch` images."""

    batch: int
    shapes: list[tuple[int, ...]]
    forward_backward: float
    per_image: float
    """How much longer forward and backward take for one more image."""
    rest: float
    """Data, optimizer and all else of a step."""
    ready: list[float]
    """When each parameter's gradient is there, counted from the beginning of forward."""
    copy: float
    """Copying all gradients into one vector and back."""
    divide: float
    """Dividing all gradients by the number of ranks."""
    add: float
    """Adding one such vector to another."""
    in_ddp: dict[str, float]
    """By strategy of `HOOKS`: how much longer forward and backward take inside of DDP, with nobody to talk to."""

    @property
    def size(self) -> float:
        """The bytes of all gradients."""
        return 4.0 * sum(product(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What a message costs. Seconds, and bytes per second in each direction."""

    latency: float
    """Of a round of a collective: a message there."""
    bandwidth: float
    """Of a collective."""
    pair_latency: float
    """Of an exchange between two neighbours, sent and received one by one."""
    pair_bandwidth: float
    message: float
    """The host's own time for a message among many."""
    collective_message: float
    """The same for a collective, besides its latency."""
    interference: float
    """How much longer computing takes for each byte that is all-reduced meanwhile, by the same cores, say."""

    @classmethod
    def given(cls, *, latency: float, bandwidth: float) -> Network:
        """Return a network of which no more is known."""
        return cls(
            latency=latency,
            bandwidth=bandwidth,
            pair_latency=latency,
            pair_bandwidth=bandwidth,
            message=0.0,
            collective_message=0.0,
            interference=0.0,
        )

    def all_reduce(self, size: float, world_size: int) -> float:
        """Return the seconds of all-reducing `size` bytes around a ring of `world_size` ranks."""
        return 2 * (world_size - 1) * (self.latency + size / world_size / self.bandwidth)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A step of one strategy. Seconds."""

    strategy: str
    world_size: int
    step: float
    exposed: float
    """Communication that nothing hides."""
    efficiency: float
    """The step of one rank alone over this one: 1 is linear scaling."""


def predict(
    strategy: str, compute: Compute, network: Network, world_size: int, *, bucket_cap_mb: int = 25
) -> Prediction:
    """Return what a step of `strategy` takes on `world_size` ranks that have `compute.batch` images each."""
    alone = compute.forward_backward + compute.rest
    exposed = 0.0
    if world_size > 1:
        match strategy:
            case "ddp" | "ddp, bf16 hook" | "ddp, powersgd":
                exposed = exposed_by_ddp(compute, network, world_size, strategy, bucket_cap_mb=bucket_cap_mb)
            case "allreduce, flat":
                exposed = compute.copy + compute.divide + network.all_reduce(compute.size, world_size)
            case "allreduce, parameter":
                sizes = [4.0 * product(shape) for shape in compute.shapes]
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
    return Prediction(
        strategy=strategy, world_size=world_size, step=alone + exposed, exposed=exposed,
        efficiency=alone / (alone + exposed),
    )  # fmt: skip


def exposed_by_ddp(
    compute: Compute, network: Network, world_size: int, strategy: str = "ddp", *, bucket_cap_mb: int
) -> float:
    """Return by how much a step lasts longer: DDP's own work, what is sent in time slowing computing down, the rest.

    A bucket leaves when the last of its gradients is there and the one before it has arrived.
    """
    own_work = compute.in_ddp[strategy]
    backward_ends = compute.forward_backward + own_work
    stretch = backward_ends / compute.forward_backward
    sent = buckets(compute, HOOKS[strategy], bucket_cap_mb=bucket_cap_mb)
    size = sum(bucket for bucket, _ in sent)
    in_time = size * (backward_ends - sent[0][1] * stretch) / network.all_reduce(size, world_size)
    slower = network.interference * min(in_time, size - sent[-1][0])
    stretch *= 1 + slower / backward_ends
    backward_ends += slower
    several = (MESSAGES[HOOKS[strategy]] - 1) * network.all_reduce(0, world_size)
    arrived = 0.0
    for bucket, ready in sent:
        arrived = max(arrived, ready * stretch) + network.all_reduce(bucket, world_size) + several
    return own_work + slower + max(0.0, arrived - backward_ends)


def buckets(compute: Compute, hook: CommHook, *, bucket_cap_mb: int) -> list[tuple[float, float]]:
    """Return DDP's buckets, (bytes to send, ready at), in the order in which they are sent: the last layer's first."""
    config = DDPConfig(comm_hook=hook, bucket_cap_mb=bucket_cap_mb)
    cap = config.cap_mb(compute.size) * MB
    order = sorted(range(len(compute.shapes)), key=lambda index: compute.ready[index])
    found: list[tuple[float, float]] = []
    size, sent, ready = 0.0, 0.0, 0.0
    for index in order:
        size, ready = size + 4.0 * product(compute.shapes[index]), compute.ready[index]
        sent += wire_bytes(config, compute.shapes[index])
        if size >= cap:
            found.append((sent, ready))
            size, sent = 0.0, 0.0
    return [*found, (sent, ready)] if size else found


def exposed_by_server(compute: Compute, network: Network, world_size: int) -> float:
    """Return the seconds of pushing to one server and pulling from it: its link carries every other rank's all."""
    others = world_size - 1
    one_way = network.pair_latency + others * (
        compute.size / network.pair_bandwidth + len(compute.shapes) * network.message
    )
    return 2 * one_way + others * compute.add


def smallest_hiding_batch(compute: Compute, network: Network, world_size: int) -> int | None:
    """Return the smallest share at which t1 ≥ t2: forward and backward last as long as all-reducing all gradients.

    None if there is none below a million images.
    """
    needed = network.all_reduce(compute.size, world_size)
    fixed = compute.forward_backward - compute.per_image * compute.batch
    if compute.per_image <= 0:
        return None
    batch = max(1, int(-(-(needed - fixed) // compute.per_image)))
    return batch if batch < 1_000_000 else None
