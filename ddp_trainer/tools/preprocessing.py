"""The preprocessing of a model's input, which converts a picture of any size to one shape."""

from typing import NamedTuple

from torch import Tensor

from ddp_trainer.data.dataset import Shape
from ddp_trainer.data.images.decoding import Box, resize, with_channels

STRETCH = "stretch"


class Preprocessing(NamedTuple):
    """The preprocessing of a model's input, as it is saved in checkpoints."""

    mean: list[float]
    """Mean per channel, on pixels scaled to [0, 1]; one value applies to all channels."""
    std: list[float]
    """Standard deviation per channel; one value applies to all channels."""
    image_shape: Shape
    center_crop: float | str | None = None
    """The side of the center crop, divided by that of the largest possible center crop.

    `STRETCH`: a picture is not cropped. None: unknown, so that pictures of another size are
    refused.
    """

    def prepare(self, image: Tensor) -> Tensor:
        """Return `image` with the channels and the size that the model expects.

        image: uint8 [c, h, w]. Returns uint8 [C, H, W].

        Raises:
            ValueError: the channels cannot be converted, or the image has another size and
            `center_crop` is unknown.
        """
        channels, height, width = self.image_shape
        image = with_channels(image, channels)
        is_prepared = image.shape[1:] == (height, width)
        if is_prepared and self.center_crop in (None, 1, STRETCH):
            return image
        if self.center_crop is None:
            raise ValueError(
                f"it has {image.shape[2]} × {image.shape[1]} pixels, and the model expects"
                f" {width} × {height}; its data set does not say how it prepares pictures: prepare"
                " the picture in the same way, or add the member center_crop to the data set"
            )
        return resize(image, self.box(*image.shape[1:]), (height, width))

    def box(self, height: int, width: int) -> Box:
        """Return the part that the model sees of an image of `height` × `width` pixels."""
        if self.center_crop == STRETCH:
            return Box(0, 0, height, width)
        _, rows, columns = self.image_shape
        is_low = height * columns <= width * rows
        used = (height, height * columns / rows) if is_low else (width * rows / columns, width)
        rows, columns = (max(1, round(float(self.center_crop or 1) * side)) for side in used)
        return Box((height - rows) // 2, (width - columns) // 2, rows, columns)
