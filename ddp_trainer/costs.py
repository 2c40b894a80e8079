"""What each strategy has to send, by the textbook: bytes a step, before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from torch import nn

from ddp_trainer.config import (
    AllReduceConfig,
    CommHook,
    DataParallelConfig,
    DDPConfig,
    LocalSGDConfig,
    NoSyncConfig,
    ParameterServerConfig,
    ReplicasConfig,
    RingConfig,
    SyncConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes per optimizer step."""

    sent_per_rank: float
    """The mean over ranks of what each sends."""
    busiest: float
    """What the busiest rank sends and receives: with one server, all of it passes there."""


def traffic(config: SyncConfig, shapes: list[tuple[int, ...]], *, world_size: int, optimizer_slots: int = 1) -> Traffic:
    """Return what `config` sends for parameters of `shapes` (float32) on `world_size` ranks.

    `optimizer_slots` is the number of tensors that the optimizer keeps for each parameter: 1 for momentum, 2 for Adam.

    Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009
    (doi 10.1016/j.jpdc.2008.09.002), for all that is an all-reduce.
    """
    elements = [product(shape) for shape in shapes]
    bytes_of_all = 4.0 * sum(elements)
    match config:
        case DDPConfig():
            return all_reduced(sum(wire_bytes(config, shape) for shape in shapes), world_size)
        case AllReduceConfig() | RingConfig():
            return all_reduced(bytes_of_all, world_size)
        case LocalSGDConfig(every_steps=steps):
            return all_reduced(bytes_of_all * (1 + optimizer_slots) / steps, world_size)
        case ParameterServerConfig(num_servers=servers):
            passed = 2 * (world_size - 1) * bytes_of_all  # every other rank pushes all keys and pulls them again
            own = passed / servers  # an owner's, in and out
            as_worker = 2 * bytes_of_all * (1 - 1 / servers)  # what it exchanges with the other owners
            return Traffic(sent_per_rank=passed / world_size, busiest=own + as_worker)
        case NoSyncConfig() | ReplicasConfig() | DataParallelConfig():
            return Traffic(sent_per_rank=0.0, busiest=0.0)
        case SyncConfig():
            raise TypeError(f"no textbook knows {config}")
        case _:
            assert_never(config)


def all_reduced(size: float, world_size: int) -> Traffic:
    """Return the traffic of all-reducing `size` bytes: W − 1 of W parts leave and arrive, twice."""
    sent = 2 * (world_size - 1) / world_size * size
    return Traffic(sent_per_rank=sent, busiest=2 * sent)


def wire_bytes(config: DDPConfig, shape: tuple[int, ...]) -> float:
    """Return how many bytes DDP all-reduces for a float32 gradient of `shape`."""
    match config.comm_hook:
        case CommHook.none:
            return 4.0 * product(shape)
        case CommHook.fp16 | CommHook.bf16:
            return 2.0 * product(shape)
        case CommHook.powersgd:
            return 4.0 * factor_elements(shape, config.powersgd_rank)


def factor_elements(shape: tuple[int, ...], rank: int) -> int:
    """Return the number of elements that PowerSGD sends for a gradient of `shape`: two factors, or all of it.

    Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019 (arXiv 1905.13727); torch compresses at least by half.
    """
    rows, columns = shape[0], product(shape[1:])
    rank = min(rows, columns, rank)
    compresses = len(shape) > 1 and (rows + columns) * rank * 2 < rows * columns
    return (rows + columns) * rank if compresses else rows * columns


def product(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of `shape`."""
    size = 1
    for length in shape:
        size *= length
    return size


def shapes_of(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of `model`."""
    return [tuple(parameter.shape) for parameter in model.parameters()]
