"""Augmentation of batches, with random choices for each position of an epoch or for each batch."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.config.data import AugmentConfig
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

    def draw(self, count: int, *, epoch: int) -> dict[str, Tensor]:
        """Return parameters for `count` positions: a function of (seed, epoch, count) alone.

        Each has one row for each position in an epoch's order, and exists only if it is configured:

        - offsets, int64 [N, 2]: row and column where the crop of the padded image begins;
        - flips, bool [N]: whether the image is mirrored;
        - boxes, int64 [N, 4]: top, left, bottom, right of the blanked rectangle, see `_boxes`;
        - crops, float32 [N, 4] in [0, 1): choose the crop of the image when it is read.
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
        """Return rectangles to blank, int64 [N, 4]: top, left, bottom, right.

        u: random numbers in [0, 1), [5, N]. Bottom and right are exclusive. A rectangle is empty
        with probability 1 - random_erasing. Else it has 2 to 33 % of the image's area and a ratio
        of height to width of 0.3 to 3.3, as far as that fits.

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
        """Return images, uint8 [B, C, H, W], cropped with a border of zeros and flipped."""
        if "offsets" in params:
            padded = torch.nn.functional.pad(images, [self.config.random_crop_padding] * 4)
            # a view: [B, C, 2p+1, 2p+1, H, W]
            windows = padded.unfold(2, self.height, 1).unfold(3, self.width, 1)
            rows = torch.arange(len(images), device=images.device)
            images = windows[rows, :, params["offsets"][:, 0], params["offsets"][:, 1]]
        if "flips" in params:
            # the same as torch.where, which takes three times as long on a CPU
            mask = -params["flips"].to(torch.uint8)[:, None, None, None]
            images = images.flip(-1).bitwise_xor_(images).bitwise_and_(mask).bitwise_xor_(images)
        return images

    def transform(self, images: Tensor, *, epoch: int, step: int) -> Tensor:
        """Return images, uint8 [B, C, H, W], after RandAugment and color jitter.

        All images of the epoch's global batch `step` get the same random operations, on every rank.
        """
        config = self.config
        if not (config.rand_augment or config.color_jitter):
            return images
        from ddp_trainer.data.transforms import color_jitter, rand_augment  # torchvision is slow

        def seeded(purpose: str) -> np.random.Generator:
            seed = derive_seed(self.seed, epoch=epoch, step=step, purpose=purpose)
            return np.random.default_rng(seed)

        images = rand_augment(images, config.rand_augment, seeded("rand_augment"))
        return color_jitter(images, config.color_jitter, seeded("color_jitter"))

    def erase(self, images: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Set the rectangles ``boxes`` of normalized images to 0, the mean, in place; return them.

        images: float [B, C, H, W].
        """
        if "boxes" not in params:
            return images
        top, left, bottom, right = params["boxes"][:, :, None, None].unbind(1)
        rows = torch.arange(self.height, device=images.device)[None, :, None]
        columns = torch.arange(self.width, device=images.device)[None, None, :]
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        # in place, because masked_fill would not keep the memory format
        return images.masked_fill_(inside[:, None], 0.0)
