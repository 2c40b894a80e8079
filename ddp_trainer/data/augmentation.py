"""Augmentation and normalization of batches, on the device.

Crops, flips and rectangles to erase are drawn for each sample of an epoch, all other random choices
for each global batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ddp_trainer.config.images import AugmentConfig
from ddp_trainer.distributed.seeding import derive_seed, generator


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Random crop, flip, RandAugment, color jitter and erasing for batches of images."""

    config: AugmentConfig
    height: int
    """Height of the images in pixels."""
    width: int
    """Width of the images in pixels."""
    seed: int

    @property
    def is_mixing(self) -> bool:
        """Whether images are mixed in pairs, by mixup or CutMix."""
        return self.config.mixup > 0 or self.config.cutmix > 0

    def random(self, purpose: str, *, epoch: int, step: int) -> np.random.Generator:
        """Return a generator of the random numbers that a global batch needs for `purpose`."""
        return np.random.default_rng(
            derive_seed(self.seed, epoch=epoch, step=step, purpose=purpose)
        )

    def draw(self, count: int, *, epoch: int) -> dict[str, Tensor]:
        """Return the random parameters of an epoch, which depend on (seed, epoch, count) alone.

        count: number N of positions in the epoch's order; row i of a tensor is for position i. The
        dict has only the parameters that `config` needs:

        - offsets, int64 [N, 2]: row and column, in the padded image, of the crop's first pixel;
        - flips, bool [N]: whether the image is mirrored;
        - boxes, int64 [N, 4]: top, left, bottom, right of the rectangle to erase, see `_boxes`;
        - crops, float32 [N, 4] in [0, 1): numbers that choose a crop when an image file is read.
        """
        config = self.config
        seeded = partial(generator, self.seed, epoch=epoch)
        params: dict[str, Tensor] = {}
        if pad := config.random_crop_padding:
            crop = seeded(purpose="crop")
            params["offsets"] = torch.randint(2 * pad + 1, (count, 2), generator=crop)
        if config.random_hflip:
            params["flips"] = torch.rand(count, generator=seeded(purpose="flip")) < 0.5
        if config.random_erasing:
            params["boxes"] = self._boxes(torch.rand(5, count, generator=seeded(purpose="erase")))
        if getattr(config, "random_resized_crop", None) is not None:
            params["crops"] = torch.rand(count, 4, generator=seeded(purpose="resized crop"))
        return params

    def _boxes(self, u: Tensor) -> Tensor:
        """Return the rectangles to erase, int64 [N, 4]: top, left, bottom, right.

        u: uniform random numbers in [0, 1), float32 [5, N]. Bottom and right are exclusive. With
        probability 1 - random_erasing, a rectangle is empty. Otherwise it has 2 to 33 % of the
        image's area and a ratio of height to width of 0.3 to 3.3; then a side that is longer than
        that of the image is shortened.

        Source: Zhong et al., Random Erasing Data Augmentation, 2017 (arXiv 1708.04896).
        """
        area = (0.02 + 0.31 * u[0]) * self.height * self.width
        aspect = torch.exp((2 * u[1] - 1) * torch.log(torch.tensor(3.3)))
        rows = (area * aspect).sqrt().round().clamp(1, self.height) * (
            u[2] < self.config.random_erasing
        )
        columns = (area / aspect).sqrt().round().clamp(1, self.width)
        top = (u[3] * (self.height - rows + 1)).floor()
        left = (u[4] * (self.width - columns + 1)).floor()
        return torch.stack([top, left, top + rows, left + columns], dim=1).long()

    def crop(self, images: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Return the images, uint8 [B, C, H, W], after the random crop and flip.

        params: for these images, the rows of the tensors that `draw` returns. A crop has the size
        of the image and is cut from the image with a border of zeros.
        """
        if "offsets" in params:
            padded = torch.nn.functional.pad(images, [self.config.random_crop_padding] * 4)
            # a view of all possible crops: [B, C, 2p+1, 2p+1, H, W]; p: width of the border
            windows = padded.unfold(2, self.height, 1).unfold(3, self.width, 1)
            rows = torch.arange(len(images), device=images.device)
            images = windows[rows, :, params["offsets"][:, 0], params["offsets"][:, 1]]
        if "flips" in params:
            # the same result as torch.where, which takes three times as long on a CPU
            mask = -params["flips"].to(torch.uint8)[:, None, None, None]
            images = images.flip(-1).bitwise_xor_(images).bitwise_and_(mask).bitwise_xor_(images)
        return images

    def transform(self, images: Tensor, *, epoch: int, step: int) -> Tensor:
        """Return the images, uint8 [B, C, H, W], after RandAugment and color jitter.

        On every rank, all images of the epoch's global batch `step` get the same random operations.
        """
        config = self.config
        if not (config.rand_augment or config.color_jitter):
            return images
        # here, because transforms.py imports torchvision, which takes a second
        from ddp_trainer.data.transforms import color_jitter, rand_augment

        if config.rand_augment:
            random = self.random("rand_augment", epoch=epoch, step=step)
            images = rand_augment(images, config.rand_augment, random)
        if config.color_jitter:
            random = self.random("color_jitter", epoch=epoch, step=step)
            images = color_jitter(images, config.color_jitter, random)
        return images

    def erase(self, images: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Return the normalized images, float32 [B, C, H, W], with erased rectangles, in place.

        The rectangles ``params["boxes"]`` are set to 0, which is the mean of normalized pixels.
        """
        if "boxes" not in params:
            return images
        top, left, bottom, right = params["boxes"][:, :, None, None].unbind(1)
        rows = torch.arange(self.height, device=images.device)[None, :, None]
        columns = torch.arange(self.width, device=images.device)[None, None, :]
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        # in place, because masked_fill would not keep the memory format of the images
        return images.masked_fill_(inside[:, None], 0.0)


class Normalize(nn.Module):
    """Converts uint8 pixels to float32: ``(pixels / 255 - mean) / std``."""

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
        """mean, std: one value per channel, or one for all channels, on pixels scaled to [0, 1].

        memory_format: that of the result, which should be that of the model.
        """
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

        # `rows` is a view of `images`, because a CPU is slow if the last dimension has 3 elements
        batch, channels, height, width = images.shape
        rows = images.permute(0, 2, 3, 1).view(batch, height, width * channels)
        scale = self.scale.flatten().expand(channels).repeat(width)
        shift = self.shift.flatten().expand(channels).repeat(width)
        rows.mul_(scale).add_(shift)
        return images
