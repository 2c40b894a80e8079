"""Augmentation of batches. Random choices are drawn for each position in an epoch's sample order,
or for each batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from ddp_trainer.config.data import AugmentConfig, FileAugmentConfig
from ddp_trainer.distributed.seeding import derive_seed, generator


@dataclass(slots=True)
class AugmentationParams:
    """Random parameters of augmentations, one row for each position in an epoch's order; None: not
    configured.
    """

    offsets: Tensor | None = None
    """int64 [N, 2]: row and column where the crop of the padded image begins."""
    flips: Tensor | None = None
    """bool [N]: whether the image is mirrored."""
    boxes: Tensor | None = None
    """int64 [N, 4]: top, left, bottom, right of the blanked rectangle, empty where top equals
    bottom.
    """
    crops: Tensor | None = None
    """float32 [N, 4] in [0, 1), on the CPU: random numbers that choose the crop of an image file
    when it is read.
    """

    def to(self, device: torch.device) -> Self:
        """Return these parameters on `device`, except `crops`, which stay on the CPU."""
        parts = (
            None if t is None else t.to(device) for t in (self.offsets, self.flips, self.boxes)
        )
        return type(self)(*parts, crops=self.crops)

    def at(self, positions: slice | Tensor) -> Self:
        """Return the parameters of the images at `positions`, without `crops`."""
        return type(self)(
            *(None if t is None else t[positions] for t in (self.offsets, self.flips, self.boxes))
        )


class Augmentation:
    """Random crop, flip, RandAugment, color jitter and erasing for batches of `height` × `width`
    pixels.
    """

    def __init__(self, config: AugmentConfig, *, height: int, width: int, seed: int) -> None:
        self.config = config
        self.height = height
        self.width = width
        self.seed = seed
        self.transforms: list[Callable[[Tensor], Tensor]] = []
        if config.rand_augment or config.color_jitter:
            from torchvision.transforms import v2  # takes a third of a second to import

            amount = config.color_jitter
            self.transforms += [v2.RandAugment(config.rand_augment)] if config.rand_augment else []
            self.transforms += [v2.ColorJitter(amount, amount, amount)] if amount else []

    def draw(self, count: int, *, epoch: int) -> AugmentationParams:
        """Return random parameters for the `count` positions of an epoch; they depend on (seed,
        epoch, count) alone.
        """
        params = AugmentationParams()
        config = self.config
        seeded = partial(generator, self.seed, epoch=epoch)
        if pad := config.random_crop_padding:
            params.offsets = torch.randint(
                2 * pad + 1, (count, 2), generator=seeded(purpose="crop")
            )
        if config.random_hflip:
            params.flips = torch.rand(count, generator=seeded(purpose="flip")) < 0.5
        if config.random_erasing:
            params.boxes = self._boxes(torch.rand(5, count, generator=seeded(purpose="erase")))
        if isinstance(config, FileAugmentConfig) and config.random_resized_crop is not None:
            params.crops = torch.rand(count, 4, generator=seeded(purpose="resized crop"))
        return params

    def _boxes(self, u: Tensor) -> Tensor:
        """Return rectangles to blank, int64 [N, 4]: top, left, bottom, right. u: random numbers in
        [0, 1), [5, N].

        Bottom and right are exclusive. Rectangles have 2 to 33 % of the image's area and a ratio of
        height to width of 0.3 to 3.3, as far as that fits; they are empty with probability 1 -
        random_erasing.

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
        """Return the images cropped and flipped: uint8 [B, C, H+2p, W+2p], padded by p pixels ->
        [B, C, H, W].
        """
        images = padded
        if params.offsets is not None:
            # a view: [B, C, 2p+1, 2p+1, H, W]
            windows = padded.unfold(2, self.height, 1).unfold(3, self.width, 1)
            rows = torch.arange(len(padded), device=padded.device)
            images = windows[rows, :, params.offsets[:, 0], params.offsets[:, 1]]
        # the same as torch.where, which takes three times as long on a CPU
        if params.flips is not None:
            mask = -params.flips.to(torch.uint8)[:, None, None, None]
            images = images.flip(-1).bitwise_xor_(images).bitwise_and_(mask).bitwise_xor_(images)
        return images

    def transform(self, images: Tensor, *, epoch: int, step: int) -> Tensor:
        """Return images, uint8 [B, C, H, W], after RandAugment and color jitter.

        All images of the epoch's global batch `step` get the same random operations, on every rank.
        """
        for transform in self.transforms:
            # the transforms draw from torch's generator on the CPU
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(
                    derive_seed(self.seed, epoch=epoch, step=step, purpose=type(transform).__name__)
                )
                images = transform(images)
        return images

    def erase(self, images: Tensor, params: AugmentationParams) -> Tensor:
        """Return images, float [B, C, H, W], with the rectangles ``boxes`` set to 0, the mean of
        normalized images.
        """
        if params.boxes is None:
            return images
        top, left, bottom, right = params.boxes[:, :, None, None].unbind(1)
        rows = torch.arange(self.height, device=images.device)[None, :, None]
        columns = torch.arange(self.width, device=images.device)[None, None, :]
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        return images.masked_fill(inside[:, None], 0.0)
