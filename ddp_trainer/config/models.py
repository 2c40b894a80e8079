"""The group ``model``."""

from enum import StrEnum

from omegaconf import MISSING

from ddp_trainer.config.errors import config_class, setting
from ddp_trainer.registry import register_model

Stem = StrEnum("Stem", ["auto", "imagenet", "small"])
LeNetInit = StrEnum("LeNetInit", ["default", "d2l"])


@config_class
class ModelConfig:
    name: str = MISSING
    weights: str | None = None
    """File of initial weights, from safetensors or torch.save; a last layer of another size is not
    loaded.
    """
    freeze: list[str] = setting([])
    """Modules and parameters that are not trained; backbone: all but the last layer."""


@config_class
class ResNet18Config(ModelConfig):
    name: str = "resnet18"
    stem: Stem = Stem.auto
    """First layers, imagenet: 7×7 convolution of stride 2 and a max pool; small: 3×3 convolution of
    stride 1, no pool; auto: small if a side of the images is below 64 pixels.
    """


@config_class
class LeNetConfig(ModelConfig):
    name: str = "lenet"
    init: LeNetInit = LeNetInit.default
    """default: as in PyTorch; d2l: weights from a normal distribution, standard deviation 0.01."""


@config_class
class TorchvisionModelConfig(ModelConfig):
    name: str = "torchvision"
    arch: str = "resnet50"
    """Name of one of torchvision's classifiers, for example efficientnet_b0."""


@config_class
class TimmModelConfig(ModelConfig):
    name: str = "timm"
    arch: str = "resnet50"
    """Name of one of timm's models, for example vit_small_patch16_224."""


register_model("resnet18", ResNet18Config, builder="ddp_trainer.models.resnet:build_resnet18")
register_model("lenet", LeNetConfig, builder="ddp_trainer.models.lenet:LeNet")
register_model(
    "torchvision",
    TorchvisionModelConfig,
    builder="ddp_trainer.models.torchvision_and_timm:build_torchvision",
)
register_model(
    "timm", TimmModelConfig, builder="ddp_trainer.models.torchvision_and_timm:build_timm"
)
