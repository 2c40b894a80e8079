"""LeNet with 20 and 50 channels, average pooling and 128 hidden units."""

from torch import Tensor, nn

from ddp_trainer.config.errors import require
from ddp_trainer.config.models import LeNetConfig, LeNetInit


class LeNet(nn.Sequential):
    """Two convolutions and two linear layers; ConfigError for images smaller than 8×8 pixels.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998; the layer
    sizes are those of Dive into Deep Learning, "Training on Multiple GPUs".
    """

    def __init__(
        self, config: LeNetConfig, *, image_shape: tuple[int, int, int], num_classes: int
    ) -> None:
        channels, height, width = image_shape
        # Without padding, nothing would be left of images below 14 pixels, for example data=digits.
        padding = 3 if min(height, width) < 14 else 0
        rows, columns = (((side + 2 * padding - 2) // 2 - 4) // 2 for side in (height, width))
        require(
            rows > 0 and columns > 0,
            f"model=lenet needs images of at least 8×8 pixels, and these have {height}×{width}: use"
            " model=resnet18",
        )
        super().__init__(
            nn.Conv2d(channels, 20, kernel_size=3, padding=padding),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(20, 50, kernel_size=5),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * rows * columns, 128),
            nn.ReLU(),
            nn.Linear(128, num_classes),
        )
        if config.init is LeNetInit.d2l:
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=0.01)
                else:
                    nn.init.zeros_(parameter)

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits: float32 [B, C, H, W] -> [B, classes]."""
        # torch 2.11 does not compile the forward method of `nn.Sequential` itself.
        for layer in self:
            input = layer(input)
        return input
