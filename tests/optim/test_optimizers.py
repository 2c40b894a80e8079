"""Schedules beside torch's own, and what the builders make of a config."""

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.optimizers import (
    AdamWConfig,
    LAMBConfig,
    LARSConfig,
    OptimizerConfig,
    SGDConfig,
)
from ddp_trainer.config.schedulers import (
    ConstantConfig,
    CosineConfig,
    OneCycleConfig,
    SchedulerConfig,
    StepConfig,
)
from ddp_trainer.optim.optimizers import build_optimizer
from ddp_trainer.optim.schedulers import lr_factor

STEPS_PER_EPOCH = 7
EPOCHS = 5
TOTAL_STEPS = EPOCHS * STEPS_PER_EPOCH
PEAK = 0.3


def optimizer_at(lr: float = PEAK) -> SGD:
    return SGD([nn.Parameter(torch.zeros(1))], lr)


def rates(scheduler: LRScheduler, steps: int = TOTAL_STEPS) -> list[float]:
    """Return the learning rate of each of the first `steps` optimizer steps."""
    seen = []
    for _ in range(steps):
        seen.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def build_scheduler(config: SchedulerConfig, optimizer: SGD) -> LRScheduler:
    return LambdaLR(optimizer, lr_factor(config, steps_per_epoch=STEPS_PER_EPOCH, epochs=EPOCHS))


def our_rates(config: SchedulerConfig, steps: int = TOTAL_STEPS) -> list[float]:
    return rates(build_scheduler(config, optimizer_at()), steps)


def cosine(optimizer: SGD, *, final_factor: float = 0.0, steps: int = TOTAL_STEPS) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=steps, eta_min=final_factor * PEAK)


def warm_up(optimizer: SGD, *, steps: int) -> LRScheduler:
    climb = LinearLR(optimizer, start_factor=1 / steps, end_factor=1, total_iters=steps - 1)
    return SequentialLR(optimizer, [climb, cosine(optimizer, steps=TOTAL_STEPS - steps)], [steps])


@pytest.mark.parametrize(
    ("config", "build_torchs"),
    [
        (ConstantConfig(), partial(ConstantLR, factor=1)),
        (
            StepConfig(every_epochs=2, gamma=0.1),
            partial(StepLR, step_size=2 * STEPS_PER_EPOCH, gamma=0.1),
        ),
        (CosineConfig(warmup_epochs=0, final_factor=0.0), cosine),
        (CosineConfig(warmup_epochs=0, final_factor=0.1), partial(cosine, final_factor=0.1)),
        (CosineConfig(warmup_epochs=1), partial(warm_up, steps=STEPS_PER_EPOCH)),
        (CosineConfig(warmup_epochs=1.5), partial(warm_up, steps=round(1.5 * STEPS_PER_EPOCH))),
    ],
)
def test_a_schedule_is_that_of_torch(
    config: SchedulerConfig, build_torchs: Callable[[SGD], LRScheduler]
) -> None:
    assert our_rates(config) == pytest.approx(rates(build_torchs(optimizer_at())))


@pytest.mark.parametrize("rise", [0.3, 0.5])
def test_onecycle_is_torchs_with_cosine_annealing(rise: float) -> None:
    total = 101  # torch peaks at step rise × total − 1, ours at rise × (total − 1): alike to a step
    torchs = OneCycleLR(
        optimizer_at(),
        PEAK,
        total_steps=total,
        pct_start=rise,
        div_factor=25,
        final_div_factor=400,
        cycle_momentum=False,
    )
    config = OneCycleConfig(rise=rise, initial_factor=1 / 25, final_factor=1 / (25 * 400))
    factor = lr_factor(config, steps_per_epoch=total, epochs=1)
    ours = [PEAK * factor(step) for step in range(total)]
    theirs = rates(torchs, total)
    assert ours[0] == pytest.approx(theirs[0])
    assert ours[-1] == pytest.approx(theirs[-1])
    assert max(ours) == pytest.approx(PEAK, rel=1e-3)
    steepest = max(abs(a - b) for a, b in zip(theirs[1:], theirs, strict=False))
    assert ours == pytest.approx(theirs, abs=steepest)


def test_a_schedule_restored_mid_way_goes_on_where_it_was() -> None:
    config = CosineConfig(warmup_epochs=1)
    through = our_rates(config)
    first = build_scheduler(config, optimizer_at())
    rates(first, 12)
    optimizer = optimizer_at()
    optimizer.load_state_dict(first.optimizer.state_dict())
    second = build_scheduler(config, optimizer)
    second.load_state_dict(first.state_dict())
    assert rates(second, TOTAL_STEPS - 12) == through[12:]


def test_scale_lr_applies_the_linear_rule() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]

    def rate(config: OptimizerConfig) -> float:
        return build_optimizer(config, parameters, global_batch_size=1024).param_groups[0]["lr"]

    assert rate(SGDConfig(lr=0.1)) == 0.1
    assert rate(SGDConfig(lr=0.1, scale_lr=True)) == pytest.approx(0.4)
    assert rate(AdamWConfig(lr=1e-3, scale_lr=True, base_batch_size=512)) == pytest.approx(2e-3)


def test_the_optimizers_step_as_torchs_plain_ones() -> None:
    pairs = [
        (
            SGDConfig(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
        ),
        (
            AdamWConfig(lr=0.01, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1),
            lambda p: AdamW(p, 0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, foreach=False),
        ),
    ]
    for config, plain in pairs:
        ours = nn.Parameter(torch.ones(4))
        theirs = nn.Parameter(torch.ones(4))
        optimizers = [build_optimizer(config, [ours], global_batch_size=1), plain([theirs])]
        for _ in range(3):
            for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
                parameter.grad = torch.tensor([1.0, -2.0, 0.5, 0.0]) * parameter.detach()
                optimizer.step()
        torch.testing.assert_close(ours, theirs)


# --- layer-wise optimizers ----------------------------------------------------------------------


@pytest.mark.parametrize("config", [LARSConfig(weight_decay=0.1), LAMBConfig(weight_decay=0.1)])
def test_a_layer_moves_in_proportion_to_its_length_and_biases_do_not_decay(
    config: OptimizerConfig,
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(20, 10)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    optimizer = build_optimizer(config, layer.parameters(), global_batch_size=256)
    layer.weight.grad = torch.randn(10, 20) * 1e6
    layer.bias.grad = torch.zeros(10)
    optimizer.step()
    moved = (layer.weight.detach() - before[0]).norm()
    share = config.trust_coefficient if isinstance(config, LARSConfig) else 1.0
    assert float(moved) == pytest.approx(float(config.lr * share * before[0].norm()), rel=1e-3)
    assert torch.equal(layer.bias, before[1])


def test_an_optimizer_whose_library_is_missing_is_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(
        ConfigError,
        match=(
            r"optimizer=lars and optimizer=lamb need timm: pip install 'ddp_trainer\[large-batch\]'"
        ),
    ):
        build_optimizer(LARSConfig(), nn.Linear(2, 2).parameters(), global_batch_size=256)
