"""The group ``model``."""

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from ddp_trainer.registry import register_model


class Stem(Enum):
    imagenet = "imagenet"
    small = "small"


class LeNetInit(Enum):
    default = "default"
    d2l = "d2l"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class ResNet18Config(ModelConfig):
    name: str = "resnet18"
    stem: Stem = Stem.small
    """imagenet: 7×7 stride 2 and a max pool; small: 3×3 stride 1, no max pool, for images under 64 pixels."""


@dataclass(kw_only=True, slots=True)
class LeNetConfig(ModelConfig):
    name: str = "lenet"
    init: LeNetInit = LeNetInit.default
    """default: PyTorch's; d2l: weights from a normal distribution of standard deviation 0.01."""


register_model("resnet18", ResNet18Config, builder="ddp_trainer.models.resnet:build_resnet18")
register_model("lenet", LeNetConfig, builder="ddp_trainer.models.lenet:build_lenet")
