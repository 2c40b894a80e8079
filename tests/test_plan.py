"""The notes' t1 and t2: the model against closed forms, and the command on real ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY, compose, launch, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.config import CommHook
from ddp_trainer.costs import shapes_of
from ddp_trainer.distributed import connected
from ddp_trainer.environment import read_environment
from ddp_trainer.prediction import (
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
NETWORK = Network.given(latency=1e-4, bandwidth=125e6)
COMPUTE = Compute(
    batch=100,
    shapes=[(MB // 4,), (MB,), (MB // 2,)],  # 1, 4 and 2 MiB
    forward_backward=0.9,
    per_image=0.008,
    rest=0.1,
    ready=[0.9, 0.6, 0.5],
    copy=0.01,
    divide=0.002,
    add=0.004,
    in_ddp=dict.fromkeys(HOOKS, 0.0),
)
SIZE = 7 * MB


def with_share(batch: int) -> Compute:
    """Return the same rank with a share of `batch` images."""
    return replace(COMPUTE, batch=batch, forward_backward=0.9 + 0.008 * (batch - 100))


def exposed(strategy: str, world_size: int) -> float:
    return predict(strategy, COMPUTE, NETWORK, world_size).exposed


def test_one_rank_has_nothing_to_send() -> None:
    for strategy in STRATEGIES:
        found = predict(strategy, COMPUTE, NETWORK, 1)
        assert (found.step, found.exposed, found.efficiency) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("ranks", [2, 4, 4096])
def test_what_does_not_overlap_costs_what_it_sends(ranks: int) -> None:
    rounds = 2 * (ranks - 1)
    ring = rounds * (1e-4 + SIZE / ranks / 125e6)
    assert exposed("allreduce, flat", ranks) == pytest.approx(ring + 0.01 + 0.002)
    assert exposed("ring", ranks) == pytest.approx(ring + 0.01 + 0.002 + 0.004 * (ranks - 1) / ranks)
    two_messages_more = 2 * rounds * 1e-4
    assert exposed("allreduce, parameter", ranks) == pytest.approx(ring + two_messages_more + 0.002)
    busy = replace(NETWORK, collective_message=0.1)
    found = predict("allreduce, parameter", COMPUTE, busy, ranks).exposed
    assert found == pytest.approx(ring + two_messages_more + 0.002 + 3 * 0.1)
    assert exposed("parameter_server, 1", ranks) == pytest.approx(
        2 * 1e-4 + 2 * (ranks - 1) * SIZE / 125e6 + (ranks - 1) * 0.004
    )


def test_buckets_are_sent_from_the_last_layer_on() -> None:
    assert buckets(COMPUTE, CommHook.none, bucket_cap_mb=25) == [(7 * MB, 0.9)]
    assert buckets(COMPUTE, CommHook.none, bucket_cap_mb=4) == [(6 * MB, 0.6), (MB, 0.9)]
    assert buckets(COMPUTE, CommHook.none, bucket_cap_mb=2) == [(2 * MB, 0.5), (4 * MB, 0.6), (MB, 0.9)]


def _sizes_of_ddps_buckets(cap_mb: int, hook: CommHook) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the bytes of DDP's buckets after some steps, and the shapes of the parameters."""
    config = compose(*TINY, f"sync.bucket_cap_mb={cap_mb}", f"sync.comm_hook={hook.name}")
    with connected(config, read_environment()) as world:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        replica = build_sync(config.sync, world).wrap(model)
        assert isinstance(replica, DistributedDataParallel)
        for _ in range(3):
            replica(torch.ones(1, 512)).sum().backward()
        sizes = replica._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        del replica
    return [int(size) for size in sizes.split(",")], shapes_of(model)


@pytest.mark.parametrize(("cap_mb", "hook"), [(2, CommHook.none), (3, CommHook.none), (2, CommHook.powersgd)])
def test_buckets_are_those_of_ddp(cap_mb: int, hook: CommHook) -> None:
    [(sizes, shapes)] = on_ranks(1, _sizes_of_ddps_buckets, cap_mb, hook)
    compute = replace(COMPUTE, shapes=shapes, ready=[float(len(shapes) - index) for index in range(len(shapes))])
    found = buckets(compute, hook, bucket_cap_mb=cap_mb)
    assert len(found) == len(sizes)
    if hook is CommHook.none:
        assert [size for size, _ in found] == sizes


def test_hooks_send_less() -> None:
    assert buckets(COMPUTE, CommHook.bf16, bucket_cap_mb=2) == [(MB, 0.5), (2 * MB, 0.6), (MB / 2, 0.9)]
    square = replace(COMPUTE, shapes=[(512, 512)], ready=[0.9])  # 1 MiB, as two factors of 512 × 2
    assert buckets(square, CommHook.powersgd, bucket_cap_mb=4) == [(4 * 2 * 512 * 2, 0.9)]
    slow = replace(NETWORK, bandwidth=1e6)
    three_messages = 2 * (3 * 1e-4 + 4 * 2 * 512 * 2 / 2 / 1e6)
    assert exposed_by_ddp(square, slow, 2, "ddp, powersgd", bucket_cap_mb=4) == pytest.approx(three_messages)


def test_what_ddp_does_itself_delays_its_buckets() -> None:
    working = replace(COMPUTE, in_ddp=dict.fromkeys(HOOKS, 0.09))
    last = NETWORK.all_reduce(MB, 2)
    assert exposed_by_ddp(working, NETWORK, 2, bucket_cap_mb=2) == pytest.approx(0.09 + last)


def test_only_what_backward_does_not_hide_is_exposed() -> None:
    last = NETWORK.all_reduce(MB, 2)  # the others have arrived long before backward ends
    assert exposed_by_ddp(COMPUTE, NETWORK, 2, bucket_cap_mb=2) == pytest.approx(last)
    slow = replace(NETWORK, bandwidth=1e6)
    together = NETWORK.latency * 6 + 7 * MB / 1e6  # three buckets one after another, the first from 0.5 s on
    assert exposed_by_ddp(COMPUTE, slow, 2, bucket_cap_mb=2) == pytest.approx(0.5 + together - 0.9)


def test_what_is_sent_meanwhile_slows_computing_down() -> None:
    busy = replace(NETWORK, interference=0.01 / MB)
    last = NETWORK.all_reduce(MB, 2)  # 6 of 7 MiB are sent before backward ends, which is 0.06 s later for it
    assert exposed_by_ddp(COMPUTE, busy, 2, bucket_cap_mb=2) == pytest.approx(0.06 + last)


def test_the_smallest_batch_is_where_t1_reaches_t2() -> None:
    for ranks in (2, 64, 1024):
        batch = smallest_hiding_batch(COMPUTE, NETWORK, ranks)
        needed = NETWORK.all_reduce(SIZE, ranks)
        assert batch is not None
        assert with_share(batch).forward_backward >= needed
        assert batch == 1 or with_share(batch - 1).forward_backward < needed


def test_a_smaller_share_scales_less() -> None:
    found = [predict("allreduce, flat", with_share(batch), NETWORK, 64).efficiency for batch in (50, 100, 400)]
    assert found == sorted(found)


def test_the_plan_of_two_real_ranks(tmp_path: Path) -> None:
    done = launch("--ranks=1,2,4096", "--steps=3", *TINY, f"output_dir={tmp_path}", "name=run",
                  ranks=2, module="ddp_trainer.plan", deadline=200)  # fmt: skip
    assert done.code == 0, done.output
    assert "4,096" in done.output
    assert "t1 ≥ t2" in done.output
    said = json.loads((tmp_path / "plan-run/plan.json").read_text())
    steps = {(one["strategy"], one["world_size"]): one for one in said["predictions"]}
    assert len(steps) == 3 * len(STRATEGIES)
    for strategy in STRATEGIES:
        efficiencies = [steps[strategy, ranks]["efficiency"] for ranks in (1, 2, 4096)]
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert said["network"]["latency"] > 0
    assert max(said["compute"]["ready"]) == pytest.approx(said["compute"]["forward_backward"])
    assert (tmp_path / "plan-run/plan.png").exists()


def test_one_rank_plans_for_a_network_that_is_given(tmp_path: Path) -> None:
    done = launch("--ranks=1,8", "--bandwidth-mbit=1000", "--latency-us=50", "--steps=2", *TINY,
                  f"output_dir={tmp_path}", "name=run", module="ddp_trainer.plan", deadline=200)  # fmt: skip
    assert done.code == 0, done.output
    network = json.loads((tmp_path / "plan-run/plan.json").read_text())["network"]
    assert network["bandwidth"] == 125e6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one rank alone has no network to measure"),
        (["--latency-us=5"], "--bandwidth-mbit and --latency-us are given together"),
        (["--latency-us=5", "--bandwidth-mbit=10", "--ranks=2,x"], "--ranks=2,x must be numbers from 1 on"),
    ],
)
def test_a_mistake_is_one_error(arguments: list[str], said: str) -> None:
    done = launch(*arguments, *TINY, module="ddp_trainer.plan")
    assert done.code == 2
    assert done.output.startswith("error: ")
    assert said in done.output
    assert done.output.count("\n") == 1
