"""The model of a step's time against formulas, and its buckets against those of DDP."""

from dataclasses import replace

import pytest
import torch
from conftest import TINY, compose, in_process_group, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.config.sync import CommHook
from ddp_trainer.performance.costs import Shape
from ddp_trainer.performance.step_time_model import (
    HOOKS,
    STRATEGIES,
    Compute,
    Network,
    buckets,
    exposed_by_ddp,
    predict,
    smallest_hiding_batch,
)
from ddp_trainer.sync import build_sync

MB = 2**20
NETWORK = Network(latency=1e-4, bandwidth=125e6, pair_latency=1e-4, pair_bandwidth=125e6)
COMPUTE = Compute(
    batch=100,
    shapes=[(MB // 4,), (MB,), (MB // 2,)],  # 1, 4 and 2 MiB
    forward_backward=0.9,
    per_image=0.008,
    other=0.1,
    ready=[0.9, 0.6, 0.5],
    copy=0.01,
    divide=0.002,
    add=0.004,
    ddp_overhead=dict.fromkeys(HOOKS, 0.0),
)
SIZE = 7 * MB


def with_share(batch: int) -> Compute:
    """Return the same rank with `batch` images."""
    return replace(COMPUTE, batch=batch, forward_backward=0.9 + 0.008 * (batch - 100))


def exposed(strategy: str, world_size: int) -> float:
    return predict(strategy, COMPUTE, NETWORK, world_size).exposed


def test_a_single_rank_has_no_communication() -> None:
    for strategy in STRATEGIES:
        result = predict(strategy, COMPUTE, NETWORK, 1)
        assert (result.step, result.exposed, result.efficiency) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("ranks", [2, 4, 4096])
def test_strategies_without_overlap_take_as_long_as_their_messages(ranks: int) -> None:
    rounds = 2 * (ranks - 1)
    ring = rounds * (1e-4 + SIZE / ranks / 125e6)
    assert exposed("allreduce, flat", ranks) == pytest.approx(ring + 0.01 + 0.002)
    assert exposed("ring", ranks) == pytest.approx(ring + 0.01 + 0.002 + 0.004 * (ranks - 1) / ranks)
    two_messages_more = 2 * rounds * 1e-4
    assert exposed("allreduce, parameter", ranks) == pytest.approx(ring + two_messages_more + 0.002)
    busy = replace(NETWORK, collective_message=0.1)
    result = predict("allreduce, parameter", COMPUTE, busy, ranks).exposed
    assert result == pytest.approx(ring + two_messages_more + 0.002 + 3 * 0.1)
    assert exposed("parameter_server, 1", ranks) == pytest.approx(
        2 * 1e-4 + 2 * (ranks - 1) * SIZE / 125e6 + (ranks - 1) * 0.004
    )


def test_buckets_are_sent_from_the_last_layer_to_the_first() -> None:
    assert buckets(COMPUTE, CommHook.none, bucket_cap_mb=25) == [(7 * MB, 0.9)]
    assert buckets(COMPUTE, CommHook.none, bucket_cap_mb=4) == [(6 * MB, 0.6), (MB, 0.9)]
    assert buckets(COMPUTE, CommHook.none, bucket_cap_mb=2) == [(2 * MB, 0.5), (4 * MB, 0.6), (MB, 0.9)]


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
    return [int(size) for size in sizes.split(",")], [tuple(parameter.shape) for parameter in model.parameters()]


@pytest.mark.parametrize(("cap_mb", "hook"), [(2, CommHook.none), (3, CommHook.none), (2, CommHook.powersgd)])
def test_buckets_are_those_of_ddp(cap_mb: int, hook: CommHook) -> None:
    [(sizes, shapes)] = on_ranks(1, _sizes_of_ddps_buckets, cap_mb, hook)
    compute = replace(COMPUTE, shapes=shapes, ready=[float(len(shapes) - index) for index in range(len(shapes))])
    result = buckets(compute, hook, bucket_cap_mb=cap_mb)
    assert len(result) == len(sizes)
    if hook is CommHook.none:
        assert [size for size, _ in result] == sizes


def test_hooks_send_fewer_bytes() -> None:
    assert buckets(COMPUTE, CommHook.bf16, bucket_cap_mb=2) == [(MB, 0.5), (2 * MB, 0.6), (MB / 2, 0.9)]
    square = replace(COMPUTE, shapes=[(512, 512)], ready=[0.9])  # 1 MiB, as two factors of 512 × 2
    assert buckets(square, CommHook.powersgd, bucket_cap_mb=4) == [(4 * 2 * 512 * 2, 0.9)]
    slow = replace(NETWORK, bandwidth=1e6)
    three_messages = 2 * (3 * 1e-4 + 4 * 2 * 512 * 2 / 2 / 1e6)
    assert exposed_by_ddp(square, slow, 2, strategy="ddp, powersgd", bucket_cap_mb=4) == pytest.approx(three_messages)


def test_the_overhead_of_ddp_delays_its_buckets() -> None:
    working = replace(COMPUTE, ddp_overhead=dict.fromkeys(HOOKS, 0.09))
    last = NETWORK.all_reduce(MB, 2)
    assert exposed_by_ddp(working, NETWORK, 2, bucket_cap_mb=2) == pytest.approx(0.09 + last)


def test_only_messages_after_backward_are_exposed() -> None:
    last = NETWORK.all_reduce(MB, 2)  # the others have arrived long before backward ends
    assert exposed_by_ddp(COMPUTE, NETWORK, 2, bucket_cap_mb=2) == pytest.approx(last)
    slow = replace(NETWORK, bandwidth=1e6)
    together = NETWORK.latency * 6 + 7 * MB / 1e6  # three buckets one after another, the first from 0.5 s on
    assert exposed_by_ddp(COMPUTE, slow, 2, bucket_cap_mb=2) == pytest.approx(0.5 + together - 0.9)


def test_overlapping_messages_slow_computing_down() -> None:
    busy = replace(NETWORK, interference=0.01 / MB)
    last = NETWORK.all_reduce(MB, 2)  # 6 of 7 MiB are sent before backward ends, which is 0.06 s later for it
    assert exposed_by_ddp(COMPUTE, busy, 2, bucket_cap_mb=2) == pytest.approx(0.06 + last)


def test_the_smallest_hiding_batch_takes_as_long_as_the_all_reduce() -> None:
    for ranks in (2, 64, 1024):
        batch = smallest_hiding_batch(COMPUTE, NETWORK, ranks)
        needed = NETWORK.all_reduce(SIZE, ranks)
        assert batch is not None
        assert with_share(batch).forward_backward >= needed
        assert batch == 1 or with_share(batch - 1).forward_backward < needed


def test_a_smaller_batch_per_rank_scales_less() -> None:
    result = [predict("allreduce, flat", with_share(batch), NETWORK, 64).efficiency for batch in (50, 100, 400)]
    assert result == sorted(result)
