"""The bytes that each strategy sends in an optimizer step, by arithmetic alone: nothing is measured here."""

import math
from dataclasses import dataclass

from ddp_trainer.config.sync import (
    AllReduceConfig,
    CommHook,
    DDPConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    RingConfig,
    SyncConfig,
)

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes per optimizer step."""

    sent_per_rank: float
    """The mean over ranks of the bytes that a rank sends."""
    busiest: float
    """Bytes that the busiest rank sends and receives; a single parameter server exchanges all of them."""


def traffic(config: SyncConfig, shapes: list[Shape], *, world_size: int, num_state_tensors: int = 1) -> Traffic | None:
    """Return the traffic of a strategy for float32 gradients of `shapes`; None for a strategy from a plug-in.

    `num_state_tensors` is the number of tensors that the optimizer keeps for each parameter: 1 for momentum, 2 for
    Adam.

    Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009
    (doi 10.1016/j.jpdc.2008.09.002), for all-reduce.
    """
    gradient_bytes = 4.0 * sum(math.prod(shape) for shape in shapes)
    if config.single_process:
        return Traffic(sent_per_rank=0.0, busiest=0.0)
    match config:
        case DDPConfig():
            return all_reduce_traffic(sum(wire_bytes(config, shape) for shape in shapes), world_size)
        case AllReduceConfig() | RingConfig():
            return all_reduce_traffic(gradient_bytes, world_size)
        case LocalSGDConfig(every_steps=steps):
            return all_reduce_traffic(gradient_bytes * (1 + num_state_tensors) / steps, world_size)
        case ParameterServerConfig(num_servers=servers):
            total = 2 * (world_size - 1) * gradient_bytes  # every rank that is not the owner pushes and pulls each key
            as_owner = total / servers  # received and sent
            as_worker = 2 * gradient_bytes * (1 - 1 / servers)  # exchanged with the other owners
            return Traffic(sent_per_rank=total / world_size, busiest=as_owner + as_worker)
        case _:
            return None


def all_reduce_traffic(size: float, world_size: int) -> Traffic:
    """Return the traffic of an all-reduce of `size` bytes: (W - 1) / W of them are sent and received, twice."""
    sent = 2 * (world_size - 1) / world_size * size
    return Traffic(sent_per_rank=sent, busiest=2 * sent)


def wire_bytes(config: DDPConfig, shape: Shape) -> float:
    """Return the number of bytes that DDP all-reduces for a float32 gradient of `shape`."""
    match config.comm_hook:
        case CommHook.none:
            return 4.0 * math.prod(shape)
        case CommHook.fp16 | CommHook.bf16:
            return 2.0 * math.prod(shape)
        case CommHook.powersgd:
            return 4.0 * powersgd_elements(shape, config.powersgd_rank)


def powersgd_elements(shape: Shape, rank: int) -> int:
    """Return the number of elements that PowerSGD sends for a gradient of `shape`: two factors, or the gradient itself.

    Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019 (arXiv 1905.13727); torch sends factors only where they have
    less than half of the elements.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rows, columns, rank)
    compresses = len(shape) > 1 and (rows + columns) * rank * 2 < rows * columns
    return (rows + columns) * rank if compresses else rows * columns
