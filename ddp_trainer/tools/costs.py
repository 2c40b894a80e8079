"""A cost model, which predicts the step time of a strategy for any number of ranks.

Source: Hockney, The Communication Challenge for MPP, 1994 (a message takes its latency plus its
size divided by the bandwidth); Li et al., PyTorch Distributed, 2020 (arXiv 2006.15704) for DDP's
buckets and their overlap.
"""

import math
from typing import NamedTuple

from ddp_trainer.config.sync import (
    AllReduceConfig,
    AsyncParameterServerConfig,
    Bucket,
    ChannelParallelConfig,
    CommHook,
    DDPConfig,
    FSDPConfig,
    ParameterServerConfig,
    PipelineConfig,
    RingConfig,
    SyncConfig,
)

VARIANTS: dict[str, SyncConfig] = {
    "ddp": DDPConfig(),
    "ddp, bf16 hook": DDPConfig(comm_hook=CommHook.bf16),
    "ddp, fp16 hook": DDPConfig(comm_hook=CommHook.fp16),
    "ddp, powersgd": DDPConfig(comm_hook=CommHook.powersgd, powersgd_warmup_steps=2),
    "allreduce, flat": AllReduceConfig(bucket=Bucket.flat),
    "allreduce, parameter": AllReduceConfig(bucket=Bucket.parameter),
    "ring": RingConfig(),
    "parameter_server, 1": ParameterServerConfig(),
    "async_parameter_server": AsyncParameterServerConfig(),
    "fsdp": FSDPConfig(),
    "channel_parallel": ChannelParallelConfig(),
    "pipeline, 2": PipelineConfig(),
}
"""The configs of the strategies, by their names in the tables of benchmark and plan."""
PREDICTED = {name: config for name, config in VARIANTS.items() if name != "ddp, powersgd"}
"""The strategies in the table of plan: their step time follows from `Compute` and `Network`."""
BACKWARD_SHARE = 2 / 3
"""The share of backward in the time of forward and backward.

Backward has two matrix products for each matrix product of forward.
"""


class Activations(NamedTuple):
    """The bytes per image that `channel_parallel` and a pipeline of two stages send.

    A model that cannot be cut has one stage.
    """

    image_bytes: int
    channel_bytes: int
    """The outputs of the layers whose channels are split, and twice their inputs."""
    num_layers: int
    """The number of these layers."""
    cut_bytes: int = 0
    """The output of the first stage."""
    largest_share: float = 1.0
    """The share of the stage with more work in the work of both."""
    stage_gradient_bytes: int = 0
    """The gradients of the stage with more of them: of a step, not of an image."""


class Compute(NamedTuple):
    """The measured seconds of a step of one rank with `batch` images and no communication."""

    batch: int
    num_passes: int
    """The number of microbatches, ``gradient_accumulation_steps``."""
    forward_backward: float
    other: float
    """The rest of a step: data, optimizer, Python."""
    gradient_bytes: int
    num_gradients: int
    activations: Activations


class Network(NamedTuple):
    """The latency of a message in seconds, and a rank's bandwidth in bytes/s in each direction."""

    latency: float
    bandwidth: float

    def all_reduce(self, size: float, world_size: int) -> float:
        """Return the seconds of a ring all-reduce of `size` bytes."""
        return 2 * (world_size - 1) * (self.latency + size / world_size / self.bandwidth)


def exposed_seconds(
    config: SyncConfig, compute: Compute, network: Network, world_size: int
) -> float:
    """Return the seconds that communication adds to a step with `compute.batch` images per rank."""
    size = compute.gradient_bytes
    if world_size == 1:
        return 0.0
    match config:
        case DDPConfig():
            return exposed_by_ddp(config, compute, network, world_size)
        case AllReduceConfig(bucket=Bucket.parameter):
            latencies = (compute.num_gradients - 1) * network.all_reduce(0, world_size)
            return network.all_reduce(size, world_size) + latencies
        case ParameterServerConfig():  # the server receives the gradients of all other ranks
            return 2 * (network.latency + (world_size - 1) * size / network.bandwidth)
        case AsyncParameterServerConfig():
            return exposed_by_server(compute, network, world_size)
        case ChannelParallelConfig():
            return exposed_by_channels(compute, network, world_size)
        case PipelineConfig():
            return exposed_by_pipeline(compute, network, world_size)
        case FSDPConfig():  # two all-gathers and a reduce-scatter, each half of an all-reduce
            return 1.5 * network.all_reduce(size, world_size)
        case _:
            return network.all_reduce(size, world_size)


def exposed_by_ddp(config: DDPConfig, compute: Compute, network: Network, world_size: int) -> float:
    """Return the seconds from the end of backward until DDP's last bucket has been reduced.

    It is assumed that all buckets have the same size, and that backward fills them at equal
    intervals. The all-reduce of a bucket begins when backward has filled this bucket and the
    all-reduce of the bucket before it has ended.
    """
    num_buckets = math.ceil(compute.gradient_bytes / 2**20 / config.cap_mb(compute.gradient_bytes))
    sent = compute.gradient_bytes / (1 if config.comm_hook is CommHook.none else 2)
    transfer = network.all_reduce(sent / num_buckets, world_size)
    interval = compute.forward_backward * BACKWARD_SHARE / num_buckets
    return transfer + (num_buckets - 1) * max(0.0, transfer - interval)


def exposed_by_server(compute: Compute, network: Network, world_size: int) -> float:
    """Return the seconds that asynchronous updates add to a global batch, W shares.

    The server trains without communication. Another rank waits for each exchange, and the server's
    link carries those of all.
    """
    own = compute.forward_backward + compute.other
    transfer = compute.gradient_bytes / network.bandwidth
    by_others = (world_size - 1) / (own + 2 * (network.latency + transfer))
    return world_size / (1 / own + min(by_others, 1 / transfer)) - own


def exposed_by_channels(compute: Compute, network: Network, world_size: int) -> float:
    """Return the seconds of the exchanges of channels and of their gradients, for all images."""
    sent = compute.batch * (world_size - 1) * compute.activations.channel_bytes
    messages = 3 * (world_size - 1) * compute.activations.num_layers * compute.num_passes
    return sent / network.bandwidth + messages * network.latency


def exposed_by_pipeline(compute: Compute, network: Network, world_size: int) -> float:
    """Return the seconds that a pipeline of two stages adds.

    These are the seconds in which a stage waits for the other, of the images of one rank, of the
    activations at the cut, and of the all-reduce of the stage with more parameters. The schedule
    1F1B waits for activations and gradients after each pass.
    """
    activations = compute.activations
    num_microbatches = 2 * compute.num_passes
    one_pass = compute.forward_backward / compute.num_passes * activations.largest_share
    images = compute.batch * activations.image_bytes
    cut = compute.batch / compute.num_passes * activations.cut_bytes
    num_messages = 2 * num_microbatches + 1
    return (
        (num_microbatches + 1) * one_pass
        - compute.forward_backward
        + (images + 2 * num_microbatches * cut) / network.bandwidth
        + num_messages * network.latency
        + network.all_reduce(activations.stage_gradient_bytes, world_size // 2)
    )


def smallest_hiding_batch(compute: Compute, network: Network, world_size: int) -> int:
    """Return the smallest batch per rank that computes at least as long as an all-reduce lasts.

    The time of forward and backward is assumed to be proportional to the batch.
    """
    transfer = network.all_reduce(compute.gradient_bytes, world_size)
    return max(1, math.ceil(transfer * compute.batch / compute.forward_backward))
