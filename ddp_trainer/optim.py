"""Optimizers and learning-rate schedules from their configs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import assert_never

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_trainer.config import (
    AdamWConfig,
    ConfigError,
    ConstantConfig,
    CosineConfig,
    LAMBConfig,
    LARSConfig,
    OneCycleConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
    StepConfig,
)


def build_optimizer(config: OptimizerConfig, parameters: Iterable[Parameter], *, global_batch_size: int) -> Optimizer:
    """Return the optimizer that `config` names, at its peak learning rate.

    Raises:
        ConfigError: there is no such optimizer, or its library is not installed.
    """
    lr = config.scaled_lr(global_batch_size)
    match config:
        case SGDConfig():
            return build_sgd(config, parameters, lr=lr)
        case AdamWConfig():
            beta1, beta2 = config.betas
            return AdamW(
                parameters,
                lr,
                betas=(beta1, beta2),
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=True,
            )
        case LARSConfig() | LAMBConfig():
            return build_layerwise(config, parameters, lr=lr)
        case OptimizerConfig():
            raise ConfigError(f"optimizer.name={config.name!r} is unknown: choose sgd, adamw, lars or lamb")
        case _:
            assert_never(config)


def build_sgd(config: SGDConfig, parameters: Iterable[Parameter], *, lr: float) -> SGD:
    """Return torch's fused SGD, its momentum at zero: of a first step that is skipped it would keep unset memory."""
    optimizer = SGD(
        parameters,
        lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=True,
    )
    if config.momentum > 0:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_layerwise(config: LARSConfig | LAMBConfig, parameters: Iterable[Parameter], *, lr: float) -> Optimizer:
    """Return timm's LARS or LAMB. Biases and normalisation neither decay nor have a trust ratio, as in the papers.

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017 (arXiv 1708.03888); You et
    al., Large Batch Optimization for Deep Learning, 2020 (arXiv 1904.00962).

    Raises:
        ConfigError: timm is not installed.
    """
    try:
        from timm.optim import Lamb, Lars  # an extra, and slow to import
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"optimizer={config.name} needs timm: pip install 'ddp_trainer[large-batch]', or use optimizer=sgd"
        ) from error
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    match config:
        case LARSConfig():
            return Lars(
                groups,
                lr,
                momentum=config.momentum,  # type: ignore[arg-type]  # annotated by its default, 0
                nesterov=config.nesterov,
                trust_coeff=config.trust_coefficient,
            )
        case LAMBConfig():
            beta1, beta2 = config.betas
            return Lamb(groups, lr, betas=(beta1, beta2), eps=config.eps, max_grad_norm=None)


def match_layout(optimizer: Optimizer) -> None:
    """Give the optimizer's state the memory layout of the parameters; it may have been saved with another.

    Fused kernels walk through a parameter and its state side by side and see no difference.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def build_scheduler(
    config: SchedulerConfig, optimizer: Optimizer, *, steps_per_epoch: int, total_steps: int
) -> LambdaLR:
    """Return the schedule that `config` names; call ``step()`` after each optimizer step.

    The factor is a closed form of the step, so that a resumed or prolonged run needs no scheduler history.
    """
    return LambdaLR(
        optimizer,
        lambda step: lr_factor(config, step, steps_per_epoch=steps_per_epoch, total_steps=total_steps),
    )


def lr_factor(config: SchedulerConfig, step: int, *, steps_per_epoch: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0) over the peak.

    Raises:
        ConfigError: there is no such schedule.
    """
    warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    match config:
        case ConstantConfig():
            return 1.0
        case StepConfig():
            return config.gamma ** (step // (config.every_epochs * steps_per_epoch))
        case CosineConfig():
            done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            return _anneal(1.0, config.final_factor, done)
        case OneCycleConfig():
            return _one_cycle(config, step / max(1, total_steps - 1))
        case SchedulerConfig():
            raise ConfigError(f"scheduler.name={config.name!r} is unknown: choose constant, step, cosine or onecycle")
        case _:
            assert_never(config)


def _one_cycle(config: OneCycleConfig, done: float) -> float:
    """Climb, then fall.

    Source: Smith and Topin, Super-Convergence, 2017 (arXiv 1708.07120).
    """
    if done < config.rise:
        return _anneal(config.initial_factor, 1.0, done / config.rise)
    return _anneal(1.0, config.final_factor, (done - config.rise) / (1 - config.rise))


def _anneal(start: float, end: float, done: float) -> float:
    """Go from `start` to `end` along half a cosine; done: 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
