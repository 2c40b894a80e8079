"""The normalization of pixels."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """Converts uint8 pixels to floats of mean 0 and standard deviation 1.

    The result has the memory format of the model.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: torch.device | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """mean, std: per channel on pixels in [0, 1], or one value for all channels."""
        super().__init__()
        deviation = torch.tensor(std, device=device)[:, None, None]
        self.register_buffer("scale", 1 / (255 * deviation))
        self.register_buffer("shift", -torch.tensor(mean, device=device)[:, None, None] / deviation)
        self.memory_format = memory_format

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the normalized images: uint8 [B, C, H, W] -> float32 [B, C, H, W]."""
        images = pixels.to(torch.float32, memory_format=self.memory_format)
        if self.memory_format is not torch.channels_last:
            return images.mul_(self.scale).add_(self.shift)

        # by rows, because a CPU is slow over a last dimension of 3
        batch, channels, height, width = images.shape
        rows = images.permute(0, 2, 3, 1).view(batch, height, width * channels)
        scale = self.scale.flatten().expand(channels).repeat(width)
        shift = self.shift.flatten().expand(channels).repeat(width)
        rows.mul_(scale).add_(shift)
        return images
