"""Builds the classifiers of torchvision and timm, for any shape of images that they accept."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchvision import models

from ddp_trainer.config.errors import ConfigError, one_line, require, suggestion
from ddp_trainer.config.models import TimmModelConfig, TorchvisionModelConfig


def build_torchvision(
    config: TorchvisionModelConfig, *, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Module:
    """Return torchvision's `config.arch`; ConfigError if it does not exist or fit the images."""
    channels, height, width = image_shape
    check_name(config.arch, models.list_models(module=models), library="torchvision")
    options: dict[str, Any] = {}
    if config.arch.startswith("vit_"):
        options = {"image_size": height}
    elif config.arch == "maxvit_t":
        options = {"input_size": (height, width)}
    elif config.arch in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}

    def build() -> nn.Module:
        model = models.get_model(config.arch, weights=None, num_classes=num_classes, **options)
        if channels != 3:
            replace_first_convolution(model, channels)
        return model

    return build_for(build, arch=config.arch, image_shape=image_shape)


def build_timm(
    config: TimmModelConfig, *, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Module:
    """Return timm's model `config.arch`; ConfigError if it does not exist or fit the images."""
    try:
        import timm  # here, because it takes a second to import and may not be installed
    except ModuleNotFoundError as error:
        raise ConfigError("model=timm needs timm: pip install 'ddp_trainer[timm]'") from error
    check_name(config.arch.partition(".")[0], timm.list_models(), library="timm")

    def build() -> nn.Module:
        defaults = timm.get_pretrained_cfg(config.arch)
        options: dict[str, Any] = {"num_classes": num_classes, "in_chans": image_shape[0]}
        if defaults is not None and defaults.fixed_input_size:
            options["img_size"] = image_shape[1:]
        return timm.create_model(config.arch, **options)

    return build_for(build, arch=config.arch, image_shape=image_shape)


def check_name(arch: str, names: Sequence[str], *, library: str) -> None:
    """Check that `arch` is one of `names`; ConfigError with suggestions if not."""
    require(
        arch in names, f"model.arch={arch} is not a model of {library}{suggestion(arch, names)}"
    )


def build_for(
    build: Callable[[], nn.Module], *, arch: str, image_shape: tuple[int, int, int]
) -> nn.Module:
    """Return the model from `build`, tested with an image of zeros; ConfigError if this fails."""
    try:
        model = build()
        with torch.no_grad():
            model.eval()(torch.zeros(1, *image_shape))
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"model.arch={arch} does not take images of the shape {tuple(image_shape)}"
            f" ({one_line(error)}): change the size of the images (data.image_size for image"
            " files), or model.arch"
        ) from error
    return model.train()


def replace_first_convolution(model: nn.Module, channels: int) -> None:
    """Replace the weights of the first convolution by random ones for `channels` input channels."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.in_channels = channels
    first.weight = nn.Parameter(
        first.weight.new_empty(first.out_channels, channels, *first.kernel_size)
    )
    first.reset_parameters()
