"""`TrainStep` by itself, on one rank."""

import torch
from runs import cross_entropies, step_settings, world_of
from torch import nn
from torch.optim import SGD

from ddp_trainer.config.sync import NoSyncConfig
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.training.step import TrainStep

ALONE = world_of()


def build() -> TrainStep:
    model = nn.Linear(3, 2)
    return TrainStep(
        model,
        GradientSync(NoSyncConfig(), ALONE),
        SGD(model.parameters(), lr=0.5),
        lambda step: 1 / (step + 1),
        loss=cross_entropies,
        settings=step_settings(),
        world=ALONE,
    )


def test_a_restored_step_has_the_learning_rate_of_the_last_step() -> None:
    first, second = build(), build()
    assert first.lr == 0.5
    for _ in range(4):
        first(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))
    assert first.lr == first.optimizer.param_groups[0]["lr"] == 0.125
    second.load_state_dict(first.state_dict())
    assert second.lr == 0.125
