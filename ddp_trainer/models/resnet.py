"""torchvision's ResNet-18 for images of any size and number of channels."""

from torch import nn
from torchvision.models import ResNet, resnet18

from ddp_trainer.config.models import ResNet18Config, Stem

SMALL = 64
"""With stem=auto, images with a side below this number of pixels get the small stem."""


def build_resnet18(
    config: ResNet18Config, *, image_shape: tuple[int, int, int], num_classes: int
) -> ResNet:
    """Return ResNet-18 with the stem (the first layers) that `config.stem` chooses.

    The small stem does not reduce the resolution of the image.

    Source: He et al., Deep Residual Learning for Image Recognition, 2015 (arXiv 1512.03385); the
    small stem is that of Dive into Deep Learning, "Concise Implementation for Multiple GPUs".
    """
    channels, *sides = image_shape
    is_small = config.stem is Stem.small or (config.stem is Stem.auto and min(sides) < SMALL)
    model = resnet18(num_classes=num_classes)
    if is_small:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()  # type: ignore[assignment]
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model
