"""The preprocessing of a model's input: from a picture of any size to pixels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer.data.images.decoding import Box, resize

LUMA = (0.299, 0.587, 0.114)
"""The shares of red, green and blue in a gray value: those of ITU-R BT.601, as in Pillow."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """The preprocessing of a model's input, as it is saved in checkpoints."""

    mean: list[float]
    """Mean per channel, on pixels scaled to [0, 1]; one value applies to all channels."""
    std: list[float]
    """Standard deviation per channel; one value applies to all channels."""
    image_shape: list[int]
    """Channels, height and width."""
    center_crop: float | None = None
    """The side of the part in the center that is used, as a share of the largest; None: 1."""

    def prepare(self, image: Tensor) -> Tensor:
        """Return `image` with the channels and the size that the model expects.

        image: uint8 [c, h, w] -> uint8 [C, H, W]. If its ratio of height to width is another, its
        ends are cut off, so that it is not distorted. ValueError if its channels cannot be
        converted.
        """
        channels, height, width = self.image_shape
        image = with_channels(image, channels)
        if self.center_crop is None and image.shape[1:] == (height, width):
            return image
        return resize(image, self.box(*image.shape[1:]), (height, width))

    def box(self, height: int, width: int) -> Box:
        """Return the centered part of `height` × `width` pixels that the model sees."""
        _, rows, columns = self.image_shape
        is_low = height * columns <= width * rows
        used = (height, height * columns / rows) if is_low else (width * rows / columns, width)
        rows, columns = (max(1, round((self.center_crop or 1) * side)) for side in used)
        return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def with_channels(image: Tensor, channels: int) -> Tensor:
    """Return uint8 [c, h, w] with `channels` channels: color as gray, or gray repeated.

    Raises:
        ValueError: any other number of channels.
    """
    if image.shape[0] == channels:
        return image
    if (image.shape[0], channels) == (3, 1):
        weights = torch.tensor(LUMA)[:, None, None]
        return (image * weights).sum(0, keepdim=True).round().to(torch.uint8)
    if image.shape[0] == 1:
        return image.expand(channels, -1, -1)
    raise ValueError(
        f"the image has {image.shape[0]} channels, and the model expects {channels}: convert the"
        " image"
    )
