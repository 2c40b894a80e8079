"""Augmentation of whole batches: drawn once an epoch for every position, applied by index."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer.config import AugmentConfig
from ddp_trainer.seeding import generator


@dataclass(slots=True)
class Draws:
    """What happens to the image at each position of an epoch; None: nothing of that kind."""

    offsets: Tensor | None = None
    """int64 [N, 2]: row and column where the crop of the padded image begins."""
    flips: Tensor | None = None
    """bool [N]: mirrored."""
    boxes: Tensor | None = None
    """int64 [N, 4]: top, left, bottom, right of the blanked rectangle, empty where top equals bottom."""

    def to(self, device: torch.device) -> Draws:
        """Return these draws on `device`."""
        return Draws(*(None if t is None else t.to(device) for t in (self.offsets, self.flips, self.boxes)))

    def at(self, positions: slice) -> Draws:
        """Return the draws of some positions."""
        return Draws(*(None if t is None else t[positions] for t in (self.offsets, self.flips, self.boxes)))


class Augmentation:
    """Random crop, mirror and erasing for images of `height` × `width` pixels."""

    def __init__(self, config: AugmentConfig, *, height: int, width: int, seed: int) -> None:
        self.config, self.height, self.width, self.seed = config, height, width, seed

    def draw(self, count: int, *, epoch: int) -> Draws:
        """Draw for all `count` positions of an epoch: a function of (seed, epoch, position) alone."""
        draws, pad = Draws(), self.config.crop_padding
        if pad:
            crop = generator(self.seed, epoch=epoch, purpose="crop")
            draws.offsets = torch.randint(2 * pad + 1, (count, 2), generator=crop)
        if self.config.flip:
            flip = generator(self.seed, epoch=epoch, purpose="flip")
            draws.flips = torch.rand(count, generator=flip) < 0.5
        if self.config.erase:
            draws.boxes = self._draw_boxes(count, epoch)
        return draws

    def _draw_boxes(self, count: int, epoch: int) -> Tensor:
        """Draw rectangles of 2 to 33 % of the area and aspect 0.3 to 3.3.

        Source: Zhong et al., Random Erasing Data Augmentation, 2017 (arXiv 1708.04896).
        """
        u = torch.rand(5, count, generator=generator(self.seed, epoch=epoch, purpose="erase"))
        area = (0.02 + 0.31 * u[0]) * self.height * self.width
        aspect = torch.exp((2 * u[1] - 1) * torch.log(torch.tensor(3.3)))
        rows = (area * aspect).sqrt().round().clamp(1, self.height) * (u[2] < self.config.erase)
        columns = (area / aspect).sqrt().round().clamp(1, self.width)
        top = (u[3] * (self.height - rows + 1)).floor()
        left = (u[4] * (self.width - columns + 1)).floor()
        return torch.stack([top, left, top + rows, left + columns], dim=1).long()

    def pad(self, images: Tensor) -> Tensor:
        """Return `images` [N, C, H, W] with the zero border that crops reach into; done once, ahead."""
        pad = self.config.crop_padding
        return torch.nn.functional.pad(images, (pad, pad, pad, pad)) if pad else images

    def crop(self, padded: Tensor, ids: Tensor, draws: Draws) -> Tensor:
        """Gather, crop and mirror. padded: [N, C, H+2p, W+2p], ids: [B] -> [B, C, H, W], dtype kept."""
        if draws.offsets is None:
            images = padded[ids]
        else:
            windows = padded.unfold(2, self.height, 1).unfold(3, self.width, 1)  # a view: [N, C, 2p+1, 2p+1, H, W]
            images = windows[ids, :, draws.offsets[:, 0], draws.offsets[:, 1]]
        if draws.flips is not None:
            images = torch.where(draws.flips[:, None, None, None], images.flip(-1), images)
        return images

    def erase(self, images: Tensor, draws: Draws) -> Tensor:
        """Set each image's rectangle to zero, the mean of normalised images. images: [B, C, H, W] float."""
        if draws.boxes is None:
            return images
        top, left, bottom, right = draws.boxes[:, :, None, None].unbind(1)
        rows = torch.arange(self.height, device=images.device)[None, :, None]
        columns = torch.arange(self.width, device=images.device)[None, None, :]
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        return images.masked_fill(inside[:, None], 0.0)
