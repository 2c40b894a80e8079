"""The models, built from their configs."""

from __future__ import annotations

from typing import assert_never

from torch import nn

from ddp_trainer.config import ConfigError, LeNetConfig, ModelConfig, ResNet18Config
from ddp_trainer.models.lenet import LeNet

__all__ = ["LeNet", "build_model"]


def build_model(config: ModelConfig, *, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Return the model that `config` names for images of ``image_shape = (channels, height, width)``.

    Its parameters are drawn from torch's global generator: seed it alike on all ranks.

    Raises:
        ConfigError: there is no such model, or the images are too small for it.
    """
    match config:
        case ResNet18Config():
            from ddp_trainer.models.resnet import build_resnet18  # torchvision takes a second to import

            return build_resnet18(config, in_channels=image_shape[0], num_classes=num_classes)
        case LeNetConfig():
            return LeNet(config, image_shape=image_shape, num_classes=num_classes)
        case ModelConfig():
            raise ConfigError(f"model.name={config.name!r} is unknown: choose resnet18 or lenet")
        case _:
            assert_never(config)
