"""ConvMixer: patches, then blocks of a depthwise and a pointwise convolution.

Source: Trockman and Kolter, Patches Are All You Need?, 2022 (arXiv 2201.09792).
"""

from torch import Tensor, nn

from example_plugin import ConvMixerConfig


class Residual(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


def build_convmixer(
    config: ConvMixerConfig, *, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Module:
    channels, _, _ = image_shape
    width = config.width
    patch_size = config.patch_size

    def block() -> nn.Module:
        depthwise = nn.Conv2d(width, width, kernel_size=5, groups=width, padding="same")
        return nn.Sequential(
            Residual(depthwise, nn.GELU(), nn.BatchNorm2d(width)),
            nn.Conv2d(width, width, kernel_size=1),
            nn.GELU(),
            nn.BatchNorm2d(width),
        )

    return nn.Sequential(
        nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size),
        nn.GELU(),
        nn.BatchNorm2d(width),
        *(block() for _ in range(config.depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )
