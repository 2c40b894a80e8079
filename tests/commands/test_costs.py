"""The model of a step's time against formulas and against a simulation of DDP's buckets."""

import pytest

from ddp_trainer.config.sync import CommHook, DDPConfig
from ddp_trainer.tools.costs import (
    PREDICTED,
    Activations,
    Compute,
    Network,
    exposed_by_ddp,
    exposed_seconds,
    smallest_hiding_batch,
)

MB = 2**20
SIZE = 8 * MB
NETWORK = Network(latency=1e-4, bandwidth=125e6)
ACTIVATIONS = Activations(
    image_bytes=3072,
    channel_bytes=40_000,
    num_layers=3,
    cut_bytes=8000,
    largest_share=0.6,
    stage_gradient_bytes=SIZE // 2,
)
COMPUTE = Compute(
    batch=100,
    num_passes=2,
    forward_backward=0.9,
    other=0.1,
    gradient_bytes=SIZE,
    num_gradients=3,
    activations=ACTIVATIONS,
)


@pytest.mark.parametrize("strategy", PREDICTED)
def test_one_rank_has_no_communication_and_more_ranks_have_more_than_fewer(strategy: str) -> None:
    none, few, many = (
        exposed_seconds(PREDICTED[strategy], COMPUTE, NETWORK, ranks) for ranks in (1, 2, 4096)
    )
    assert none == 0 < few < many


@pytest.mark.parametrize("ranks", [2, 4, 4096])
def test_strategies_without_overlap_take_as_long_as_their_messages(ranks: int) -> None:
    ring = 2 * (ranks - 1) * (1e-4 + SIZE / ranks / 125e6)
    for strategy, seconds in {
        "allreduce, flat": ring,
        "ring": ring,
        "allreduce, parameter": ring + 2 * 2 * (ranks - 1) * 1e-4,  # two messages more
        "parameter_server, 1": 2 * 1e-4 + 2 * (ranks - 1) * SIZE / 125e6,
    }.items():
        exposed = exposed_seconds(PREDICTED[strategy], COMPUTE, NETWORK, ranks)
        assert exposed == pytest.approx(seconds)


@pytest.mark.parametrize("hook", [CommHook.none, CommHook.bf16])
@pytest.mark.parametrize("cap_mb", [1, 2, 8, 25])
@pytest.mark.parametrize("bandwidth", [125e6, 1e6])
def test_a_bucket_of_ddp_is_sent_after_its_gradients_and_the_bucket_before_it(
    hook: CommHook, cap_mb: int, bandwidth: float
) -> None:
    network = NETWORK._replace(bandwidth=bandwidth)
    count = max(1, 8 // cap_mb)
    size = SIZE / count / (1 if hook is CommHook.none else 2)
    arrived = 0.0
    for number in range(1, count + 1):
        ready = 0.3 + 0.6 * number / count  # forward takes 0.3 s, backward 0.6 s
        arrived = max(arrived, ready) + network.all_reduce(size, 4)
    config = DDPConfig(comm_hook=hook, bucket_cap_mb=cap_mb)
    assert exposed_by_ddp(config, COMPUTE, network, 4) == pytest.approx(arrived - 0.9)


def test_the_smallest_hiding_batch_takes_as_long_as_the_all_reduce() -> None:
    for ranks in (2, 64, 1024):
        batch = smallest_hiding_batch(COMPUTE, NETWORK, ranks)
        needed = NETWORK.all_reduce(SIZE, ranks)
        assert batch * 0.009 >= needed
        assert batch == 1 or (batch - 1) * 0.009 < needed
