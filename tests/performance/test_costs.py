"""The bytes of strategies and the model of a step's time against formulas; its buckets against
those of DDP.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from processes import on_ranks
from runs import TINY, compose, in_process_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.config.sync import (
    AllReduceConfig,
    CommHook,
    DDPConfig,
    LocalSGDConfig,
    NoSyncConfig,
    ParameterServerConfig,
    RingConfig,
    SyncConfig,
)
from ddp_trainer.sync import build_sync
from ddp_trainer.tools.costs import (
    VARIANTS,
    Compute,
    Network,
    Shape,
    buckets,
    ddp_bytes,
    predict,
    sent_bytes,
    smallest_hiding_batch,
)

MB = 2**20
BYTES = 4 * (64 * 32 * 9 + 64 + 640)
HOOKS = ("none", "bf16", "fp16", "powersgd")
NETWORK = Network(latency=1e-4, bandwidth=125e6, per_collective=0.002)
COMPUTE = Compute(
    batch=100,
    shapes=[(MB // 4,), (MB,), (MB // 2,)],  # 1, 4 and 2 MiB
    forward_backward=0.9,
    per_image=0.008,
    other=0.1,
    ready=[0.9, 0.6, 0.5],
    copy=0.01,
    ddp_overhead=dict.fromkeys(HOOKS, 0.0),
)
SIZE = 7 * MB


@dataclass(kw_only=True, slots=True)
class PluginConfig(SyncConfig):
    name: str = "plugin"


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        *(
            (config, ranks, 2 * (ranks - 1) / ranks * BYTES)
            for ranks in (1, 2, 4096)
            for config in (DDPConfig(), AllReduceConfig(), RingConfig(), ParameterServerConfig())
        ),
        (DDPConfig(comm_hook=CommHook.bf16), 4, 0.75 * BYTES),
        # parameters and two state tensors at every interval
        (LocalSGDConfig(every_steps=8), 2, BYTES * 3 / 8),
        (NoSyncConfig(), 1, 0),
        (PluginConfig(), 2, None),
    ],
)
def test_the_bytes_that_a_strategy_sends(
    config: SyncConfig, ranks: int, expected: float | None
) -> None:
    shapes: list[Shape] = [(64, 32, 3, 3), (64,), (10, 64)]
    sent = sent_bytes(config, shapes, world_size=ranks, num_state_tensors=2)
    assert sent == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("shape", "rank", "elements"),
    [
        ((64, 32, 3, 3), 2, (64 + 288) * 2),
        ((64,), 2, 64),
        ((10, 64), 4, 296),
        ((10, 64), 5, 640),  # twice 370 is more than 640
        ((), 2, 1),
    ],
)
def test_powersgd_sends_factors_where_they_are_at_most_half_of_the_gradient(
    shape: Shape, rank: int, elements: int
) -> None:
    assert (
        ddp_bytes(DDPConfig(comm_hook=CommHook.powersgd, powersgd_rank=rank), shape) == 4 * elements
    )


def with_share(batch: int) -> Compute:
    """Return the same rank with `batch` images."""
    return replace(COMPUTE, batch=batch, forward_backward=0.9 + 0.008 * (batch - 100))


@pytest.mark.parametrize("strategy", VARIANTS)
def test_a_single_rank_has_no_communication_and_more_ranks_are_less_efficient(
    strategy: str,
) -> None:
    alone, few, many = (predict(strategy, COMPUTE, NETWORK, ranks) for ranks in (1, 2, 4096))
    assert (alone["step"], alone["exposed"], alone["efficiency"]) == (1.0, 0.0, 1.0)
    assert 1 > few["efficiency"] > many["efficiency"]
    efficiencies = [
        predict(strategy, with_share(batch), NETWORK, 64)["efficiency"] for batch in (50, 100, 400)
    ]
    assert efficiencies == sorted(efficiencies)  # a larger batch per rank scales better


@pytest.mark.parametrize("ranks", [2, 4, 4096])
def test_strategies_without_overlap_take_as_long_as_their_messages(ranks: int) -> None:
    ring = 2 * (ranks - 1) * (1e-4 + SIZE / ranks / 125e6)
    for strategy, seconds in {
        "allreduce, flat": ring + 0.01,
        "ring": ring + 0.01,
        "allreduce, parameter": ring + 2 * 2 * (ranks - 1) * 1e-4 + 3 * 0.002,  # two messages more
        "parameter_server, 1": 2 * 1e-4 + 2 * (ranks - 1) * SIZE / 125e6,
    }.items():
        assert predict(strategy, COMPUTE, NETWORK, ranks)["exposed"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("hook", "cap_mb", "expected"),
    [
        (CommHook.none, 25, [(7 * MB, 0.9)]),
        (CommHook.none, 4, [(6 * MB, 0.6), (MB, 0.9)]),  # from the last layer to the first
        (CommHook.none, 2, [(2 * MB, 0.5), (4 * MB, 0.6), (MB, 0.9)]),
        (CommHook.bf16, 2, [(MB, 0.5), (2 * MB, 0.6), (MB / 2, 0.9)]),
    ],
)
def test_buckets_hold_what_is_ready_first(
    hook: CommHook, cap_mb: int, expected: list[tuple[float, float]]
) -> None:
    assert buckets(DDPConfig(comm_hook=hook, bucket_cap_mb=cap_mb), COMPUTE) == expected


def _sizes_of_ddps_buckets(cap_mb: int, hook: CommHook) -> tuple[list[int], list[Shape]]:
    """Return the bytes of DDP's buckets after some steps, and the shapes of the parameters."""
    config = compose(*TINY, f"sync.bucket_cap_mb={cap_mb}", f"sync.comm_hook={hook.name}")
    with in_process_group(config) as world:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        replica = build_sync(config.sync, world).wrap(model)
        assert isinstance(replica, DistributedDataParallel)
        for _ in range(3):
            replica(torch.ones(1, 512)).sum().backward()
        sizes = replica._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        del replica
    return [int(size) for size in sizes.split(",")], [
        tuple(parameter.shape) for parameter in model.parameters()
    ]


@pytest.mark.parametrize(
    ("cap_mb", "hook"), [(2, CommHook.none), (3, CommHook.none), (2, CommHook.powersgd)]
)
def test_buckets_are_those_of_ddp(cap_mb: int, hook: CommHook) -> None:
    [(sizes, shapes)] = on_ranks(1, _sizes_of_ddps_buckets, cap_mb, hook)
    compute = replace(
        COMPUTE, shapes=shapes, ready=[float(len(shapes) - index) for index in range(len(shapes))]
    )
    result = buckets(DDPConfig(comm_hook=hook, bucket_cap_mb=cap_mb), compute)
    assert len(result) == len(sizes)
    if hook is CommHook.none:
        assert [size for size, _ in result] == sizes


def test_only_ddps_messages_after_backward_are_exposed() -> None:
    # the bucket of 4 MiB has arrived long before backward ends
    last = NETWORK.all_reduce(3 * MB, 2)
    small = replace(COMPUTE, shapes=[(MB // 4,), (MB // 2,), (MB,)])
    assert predict("ddp", small, NETWORK, 2)["exposed"] == pytest.approx(last)
    slow = replace(NETWORK, bandwidth=1e6)
    together = 4e-4 + 7 * MB / 1e6  # two buckets one after another, the first from 0.5 s on
    assert predict("ddp", small, slow, 2)["exposed"] == pytest.approx(0.5 + together - 0.9)
    working = replace(small, ddp_overhead=dict.fromkeys(HOOKS, 0.09))
    assert predict("ddp", working, NETWORK, 2)["exposed"] == pytest.approx(0.09 + last)


def test_powersgd_sends_three_messages_of_factors() -> None:
    square = replace(COMPUTE, shapes=[(512, 512)], ready=[0.9])  # 1 MiB, as two factors of 512 × 2
    three_messages = 2 * (3 * 1e-4 + 4 * 2 * 512 * 2 / 2 / 125e6)
    assert predict("ddp, powersgd", square, NETWORK, 2)["exposed"] == pytest.approx(three_messages)


def test_the_smallest_hiding_batch_takes_as_long_as_the_all_reduce() -> None:
    for ranks in (2, 64, 1024):
        batch = smallest_hiding_batch(COMPUTE, NETWORK, ranks)
        needed = NETWORK.all_reduce(SIZE, ranks)
        assert batch is not None
        assert with_share(batch).forward_backward >= needed
        assert batch == 1 or with_share(batch - 1).forward_backward < needed
