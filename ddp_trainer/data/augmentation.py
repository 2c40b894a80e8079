"""Augmentation of batches, with random choices for each position of an epoch or for each batch."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ddp_trainer.config.data import AugmentConfig
from ddp_trainer.distributed.seeding import derive_seed, generator


@dataclass(slots=True)
class AugmentationParams:
    """Random parameters, one row for each position in an epoch's order; None: not configured."""

    offsets: Tensor | None = None
    """int64 [N, 2]: row and column where the crop of the padded image begins."""
    flips: Tensor | None = None
    """bool [N]: whether the image is mirrored."""
    boxes: Tensor | None = None
    """int64 [N, 4]: top, left, bottom, right of the blanked rectangle, empty if top = bottom."""

    def to(self, device: torch.device) -> Self:
        """Return these parameters on `device`."""
        return type(self)(*(None if part is None else part.to(device) for part in self._parts()))

    def at(self, positions: slice | Tensor) -> Self:
        """Return the parameters of the images at `positions`."""
        return type(self)(*(None if part is None else part[positions] for part in self._parts()))

    def _parts(self) -> list[Tensor | None]:
        return [getattr(self, field.name) for field in fields(self)]


class Augmentation:
    """Random crop, flip, RandAugment, color jitter and erasing for batches of images."""

    def __init__(self, config: AugmentConfig, *, height: int, width: int, seed: int) -> None:
        """height, width: the size of the images in pixels."""
        self.config = config
        self.height = height
        self.width = width
        self.seed = seed

    def draw(self, count: int, *, epoch: int) -> AugmentationParams:
        """Return parameters for `count` positions: a function of (seed, epoch, count) alone."""
        config = self.config
        seeded = partial(generator, self.seed, epoch=epoch)
        params = AugmentationParams()
        if pad := config.random_crop_padding:
            crop = seeded(purpose="crop")
            params.offsets = torch.randint(2 * pad + 1, (count, 2), generator=crop)
        if config.random_hflip:
            params.flips = torch.rand(count, generator=seeded(purpose="flip")) < 0.5
        if config.random_erasing:
            params.boxes = self._boxes(torch.rand(5, count, generator=seeded(purpose="erase")))
        return params

    def draw_crops(self, count: int, *, epoch: int) -> Tensor | None:
        """Return float32 [count, 4] in [0, 1), which choose the crop of each image when it is read.

        Returns None if ``random_resized_crop`` is not configured.
        """
        if getattr(self.config, "random_resized_crop", None) is None:
            return None
        random = generator(self.seed, epoch=epoch, purpose="resized crop")
        return torch.rand(count, 4, generator=random)

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

    def pad(self, images: Tensor) -> Tensor:
        """Return `images` [N, C, H, W] with the border of zeros that random crops may include."""
        pad = self.config.random_crop_padding
        return torch.nn.functional.pad(images, (pad, pad, pad, pad)) if pad else images

    def crop(self, padded: Tensor, params: AugmentationParams) -> Tensor:
        """Return the images cropped and flipped.

        padded: uint8 [B, C, H + 2p, W + 2p], padded by p pixels -> [B, C, H, W].
        """
        images = padded
        if params.offsets is not None:
            # a view: [B, C, 2p+1, 2p+1, H, W]
            windows = padded.unfold(2, self.height, 1).unfold(3, self.width, 1)
            rows = torch.arange(len(padded), device=padded.device)
            images = windows[rows, :, params.offsets[:, 0], params.offsets[:, 1]]
        if params.flips is not None:
            # the same as torch.where, which takes three times as long on a CPU
            mask = -params.flips.to(torch.uint8)[:, None, None, None]
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

    def erase(self, images: Tensor, params: AugmentationParams) -> Tensor:
        """Set the rectangles ``boxes`` of normalized images to 0, the mean, in place; return them.

        images: float [B, C, H, W].
        """
        if params.boxes is None:
            return images
        top, left, bottom, right = params.boxes[:, :, None, None].unbind(1)
        rows = torch.arange(self.height, device=images.device)[None, :, None]
        columns = torch.arange(self.width, device=images.device)[None, None, :]
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        # in place, because masked_fill would not keep the memory format
        return images.masked_fill_(inside[:, None], 0.0)
