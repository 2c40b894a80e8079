"""Strategies that shard parameters: what a rank keeps, and models that cannot be sharded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from processes import on_ranks
from runs import (
    TINY,
    assert_bitwise,
    cross_entropies,
    in_process_group,
    step_settings,
    train_all,
    trained_state,
)
from torch import Tensor, nn
from torch.optim import SGD

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.sync import ChannelParallelConfig, FSDPConfig, SyncConfig
from ddp_trainer.sync import build_sync
from ddp_trainer.sync.fsdp import blocks
from ddp_trainer.training.step import TrainStep

SHARDED = {"fsdp": FSDPConfig(), "channel_parallel": ChannelParallelConfig()}


class Odd(nn.Module):
    """A model with a tied layer, a grouped one, one with two channels, and one of large blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.drop = nn.Dropout(dropout)  # before a layer that all ranks compute
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.narrow = nn.Conv2d(8, 2, 1)
        self.one = nn.Linear(18, 18)
        self.same = nn.Linear(18, 18)
        self.same.weight = self.one.weight
        self.wide = nn.Sequential(nn.Linear(18, 9000), nn.Tanh(), nn.Linear(9000, 30))
        self.last = nn.Linear(30, 5)

    def forward(self, images: Tensor) -> Tensor:
        features = self.narrow(self.grouped(self.drop(self.first(images)).tanh()))
        features = self.same(self.one(features.flatten(1)).tanh())
        return self.last(self.wide(features))


class Dropping(Odd):
    """The odd model with dropout."""

    def __init__(self) -> None:
        super().__init__(0.5)


class Scalar(nn.Module):
    """A model with a parameter that has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1)) * self.scale


class Uncalled(nn.Module):
    """A model that uses the weight of a layer which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 6)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(images.flatten(1), self.layer.weight)


def take_steps(
    config: SyncConfig, kind: type[nn.Module], max_norm: float | None = None
) -> tuple[dict[str, np.ndarray], int, int]:
    """Train; return whole moments, weights and averages, how many elements this rank updates, and
    how many there are.
    """
    with in_process_group() as world:
        torch.manual_seed(0)
        model = kind()
        whole = sum(parameter.numel() for parameter in model.parameters())
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = TrainStep(
            model,
            build_sync(config, world),
            optimizer,
            lambda step: 1.0,
            loss=cross_entropies,
            settings=step_settings(global_batch_size=7, ema_decay=0.5, max_grad_norm=max_norm),
            world=world,
        )
        random = torch.Generator().manual_seed(1)
        for _ in range(3):
            images = torch.randn(7, 1, 3, 3, generator=random)[world.rank :: world.world_size]
            labels = torch.arange(7)[world.rank :: world.world_size] % 5
            step(images, labels)
        own = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        moments = step.state_dict()["optimizer"]["state"]
        state = {str(index): values["momentum_buffer"] for index, values in moments.items()}
        for place, one in enumerate(step.models):
            state |= {f"{place} {name}": tensor for name, tensor in one.state_dict().items()}
        return {name: tensor.detach().numpy() for name, tensor in state.items()}, own, whole


@pytest.mark.parametrize("name", SHARDED)
def test_weights_averages_and_moments_of_an_odd_model_are_those_of_one_process(name: str) -> None:
    for ranks, max_norm in ((2, None), (3, None), (3, 0.1)):
        [(expected, _, _)] = on_ranks(1, take_steps, SHARDED[name], Odd, max_norm)
        for state, own, whole in on_ranks(ranks, take_steps, SHARDED[name], Odd, max_norm):
            assert state.keys() == expected.keys()
            for key, values in expected.items():
                np.testing.assert_allclose(state[key], values, rtol=1e-5, atol=1e-6, err_msg=key)
            assert own < 1.01 * whole / ranks + 600  # and what cannot be split


def test_a_layer_whose_weights_attention_uses_is_no_block() -> None:
    encoder = nn.Sequential(nn.TransformerEncoderLayer(512, 8, dim_feedforward=512))
    assert blocks(encoder) == [encoder[0]]
    linear = nn.Linear(512, 512)
    assert blocks(nn.Sequential(nn.ModuleList([linear]), encoder)) == [linear, encoder[0]]


def test_ranks_with_the_same_images_have_the_same_dropout() -> None:
    answers = on_ranks(3, take_steps, SHARDED["channel_parallel"], Dropping)
    first, *others = [state for state, _, _ in answers]
    for other in others:
        for key, values in first.items():
            assert other[key].tobytes() == values.tobytes(), key


def error_of(config: SyncConfig, kind: type[nn.Module]) -> str:
    with pytest.raises(ConfigError) as caught:
        take_steps(config, kind)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("fsdp", Scalar, "sync=fsdp cannot shard the model: fully_shard"),
        ("channel_parallel", Uncalled, "sync=channel_parallel cannot split layer, because"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused(
    name: str, kind: type[nn.Module], message: str
) -> None:
    for error in on_ranks(2, error_of, SHARDED[name], kind):
        assert error.startswith(message)
        assert error.endswith("use sync=ddp")


@pytest.mark.parametrize("name", [*SHARDED, "pipeline"])
def test_a_resumed_run_in_bf16_has_the_bits_of_an_uninterrupted_one(
    name: str, tmp_path: Path
) -> None:
    common = (*TINY, "precision=bf16", f"sync={name}", f"output_dir={tmp_path}", "max_steps=12")
    parts = (*common, "name=parts")
    train_all(2, [(*common, "name=whole"), (*parts, "max_steps=5"), parts])
    assert_bitwise(trained_state(tmp_path / "whole"), trained_state(tmp_path / "parts"))
