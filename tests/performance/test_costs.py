"""The bytes that strategies send, against formulas."""

from dataclasses import dataclass

import pytest

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
from ddp_trainer.performance.costs import Traffic, powersgd_elements, traffic

SHAPES = [(64, 32, 3, 3), (64,), (10, 64)]
BYTES = 4 * (64 * 32 * 9 + 64 + 640)


def traffic_of(config: SyncConfig, *, world_size: int, num_state_tensors: int = 1) -> Traffic:
    result = traffic(config, SHAPES, world_size=world_size, num_state_tensors=num_state_tensors)
    assert result is not None
    return result


@pytest.mark.parametrize("ranks", [1, 2, 4, 4096])
def test_an_all_reduce_sends_hardly_more_on_many_ranks(ranks: int) -> None:
    expected = 2 * (ranks - 1) / ranks * BYTES
    for config in (DDPConfig(), AllReduceConfig(), RingConfig()):
        assert traffic_of(config, world_size=ranks).sent_per_rank == pytest.approx(expected)
    assert traffic_of(DDPConfig(comm_hook=CommHook.bf16), world_size=ranks).sent_per_rank * 2 == expected


def test_a_single_server_exchanges_all_gradients_and_many_servers_share_them() -> None:
    assert traffic_of(ParameterServerConfig(), world_size=4).busiest == 2 * 3 * BYTES
    shared = traffic_of(ParameterServerConfig(num_servers=4), world_size=4)
    assert shared.busiest == 2 * shared.sent_per_rank
    assert shared.busiest == pytest.approx(traffic_of(RingConfig(), world_size=4).busiest)


def test_local_sgd_sends_parameters_and_optimizer_state_at_every_interval() -> None:
    assert traffic_of(LocalSGDConfig(every_steps=8), world_size=2, num_state_tensors=2).sent_per_rank == BYTES * 3 / 8


def test_a_single_process_sends_nothing() -> None:
    assert traffic_of(NoSyncConfig(), world_size=1).sent_per_rank == 0


def test_powersgd_sends_factors_where_they_are_at_most_half_of_the_gradient() -> None:
    assert powersgd_elements((64, 32, 3, 3), 2) == (64 + 288) * 2
    assert powersgd_elements((64,), 2) == 64
    assert powersgd_elements((10, 64), 4) == 296
    assert powersgd_elements((10, 64), 5) == 640  # twice 370 is more than 640


@dataclass(kw_only=True, slots=True)
class PluginConfig(SyncConfig):
    name: str = "plugin"


def test_the_traffic_of_a_plug_in_is_unknown() -> None:
    assert traffic(PluginConfig(), SHAPES, world_size=2) is None
