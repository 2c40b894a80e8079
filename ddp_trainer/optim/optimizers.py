"""The optimizers, built from their configs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from ddp_trainer import registry
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.optimizers import (
    AdamWConfig,
    LAMBConfig,
    LARSConfig,
    OptimizerConfig,
    SGDConfig,
)


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[Parameter], *, global_batch_size: int
) -> Optimizer:
    """Return the optimizer that `config` chooses, at its peak learning rate.

    Raises:
        ConfigError: no parameter needs a gradient.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise ConfigError(
            "the model has no parameter that needs a gradient: remove entries from model.freeze"
        )
    return registry.build(
        "optimizer", config, trainable, lr=config.scaled_lr(global_batch_size), returns=Optimizer
    )


def build_sgd(config: SGDConfig, parameters: list[Parameter], *, lr: float) -> SGD:
    """Return torch's fused SGD, with momentum buffers that exist before the first step."""
    optimizer = SGD(
        parameters,
        lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=True,
    )
    if config.momentum > 0:  # because a skipped first update would leave them uninitialized
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_adamw(config: AdamWConfig, parameters: list[Parameter], *, lr: float) -> AdamW:
    """Return torch's fused AdamW."""
    beta1, beta2 = config.betas
    return AdamW(
        parameters,
        lr,
        betas=(beta1, beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def build_lars(config: LARSConfig, parameters: list[Parameter], *, lr: float) -> Optimizer:
    """Return timm's LARS, without weight decay for biases and normalization.

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017 (arXiv
    1708.03888).
    """
    return timm_optimizers().Lars(
        without_decay_of_vectors(parameters, config.weight_decay),
        lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        trust_coeff=config.trust_coefficient,
    )


def build_lamb(config: LAMBConfig, parameters: list[Parameter], *, lr: float) -> Optimizer:
    """Return timm's LAMB, without weight decay for biases and normalization.

    Source: You et al., Large Batch Optimization for Deep Learning, 2020 (arXiv 1904.00962).
    """
    groups = without_decay_of_vectors(parameters, config.weight_decay)
    return timm_optimizers().Lamb(
        groups, lr, betas=tuple(config.betas), eps=config.eps, max_grad_norm=None
    )


def timm_optimizers() -> Any:
    """Return the module ``timm.optim``, which is imported here because the import is slow.

    Raises:
        ConfigError: timm is not installed.
    """
    try:
        import timm.optim
    except ModuleNotFoundError as error:
        raise ConfigError(
            "optimizer=lars and optimizer=lamb need timm: pip install 'ddp_trainer[large-batch]',"
            " or use optimizer=sgd"
        ) from error
    return timm.optim


def without_decay_of_vectors(
    parameters: list[Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Return two parameter groups: the weights, and the biases and normalization parameters.

    The second group has no weight decay; timm's optimizers then use no trust ratio for it.
    """
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
