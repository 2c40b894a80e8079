"""torchvision's ResNet-18 for images of any size and number of channels."""

from torch import nn
from torchvision.models import ResNet, resnet18

from ddp_trainer.config.models import ResNet18Config, Stem

SMALL = 64
"""Images with a side of fewer pixels get the small stem by default."""


def build_resnet18(
    config: ResNet18Config, *, image_shape: tuple[int, int, int], num_classes: int
) -> ResNet:
    """Return ResNet-18, with the stem that the config chooses; auto: the small stem if a side is
    below `SMALL` pixels.

    The small stem (the first layers) does not reduce the resolution of the images. Source: He et
    al., Deep Residual Learning for Image Recognition, 2015 (arXiv 1512.03385); the small stem is
    that of Dive into Deep Learning, "Concise Implementation for Multiple GPUs".
    """
    in_channels, *sides = image_shape
    model = resnet18(num_classes=num_classes)
    if config.stem is Stem.small or (config.stem is Stem.auto and min(sides) < SMALL):
        model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()  # type: ignore[assignment]  # torchvision annotates the attribute
    elif in_channels != 3:
        model.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
