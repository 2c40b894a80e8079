"""Mixup and CutMix: each image is mixed with the next one of the global batch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.nn.functional import one_hot

from ddp_trainer.config.data import AugmentConfig
from ddp_trainer.distributed.seeding import derive_seed


class Mix(NamedTuple):
    """How the images of a global batch are mixed."""

    weight: float
    """The share of the first image of a pair."""
    box: tuple[int, int, int, int] | None
    """The part that CutMix replaces: top, left, bottom, right. None: mixup, a weighted mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """Mixes pairs of images, in a way that is a function of (seed, epoch, step) alone.

    Source: Zhang et al., mixup, 2017 (arXiv 1710.09412); Yun et al., CutMix, 2019 (arXiv
    1905.04899).
    """

    config: AugmentConfig
    height: int
    width: int
    num_classes: int
    seed: int

    def draw(self, *, epoch: int, step: int) -> Mix:
        """Return how to mix a global batch; of mixup and CutMix, each is drawn half of the time."""
        chance = np.random.default_rng(
            derive_seed(self.seed, epoch=epoch, step=step, purpose="mix")
        )
        is_cutmix = self.config.mixup == 0 or (self.config.cutmix > 0 and chance.random() < 0.5)
        alpha = self.config.cutmix if is_cutmix else self.config.mixup
        weight = float(chance.beta(alpha, alpha))
        if not is_cutmix:
            return Mix(weight, None)

        scale = (1 - weight) ** 0.5
        top, bottom = span(chance.random(), scale, self.height)
        left, right = span(chance.random(), scale, self.width)
        cut = (bottom - top) * (right - left) / (self.height * self.width)
        return Mix(1 - cut, (top, left, bottom, right))

    def apply(self, images: Tensor, labels: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
        """Return mixed images [B, C, H, W] and the probability of each class [B, classes].

        images: [2 · B, C, H, W], the images of this rank, then the images to mix them with; labels:
        int64 [2 · B], in the same order. All probabilities of a pair are 0 if one of its labels is
        negative (`NO_LABEL`: a bad image).
        """
        first, second = images.chunk(2)
        if mix.box is None:
            mixed = first.lerp(second, 1 - mix.weight)
        else:
            top, left, bottom, right = mix.box
            mixed = first.clone()
            mixed[:, :, top:bottom, left:right] = second[:, :, top:bottom, left:right]
        own, other = one_hot(labels.clamp(min=0), self.num_classes).float().chunk(2)
        known = (labels >= 0).view(2, -1).all(0)[:, None]
        return mixed, own.lerp(other, 1 - mix.weight) * known


def span(center: float, scale: float, size: int) -> tuple[int, int]:
    """Return first pixel and end of a stretch of `size` pixels; center and scale: shares of it."""
    begin = round(max(center - scale / 2, 0) * size)
    return begin, round(min(center + scale / 2, 1) * size)


def build_mixing(config: AugmentConfig, **options: int) -> Mixing | None:
    """Return `Mixing` with `options`, its other arguments; None without mixup and CutMix."""
    return Mixing(config=config, **options) if config.mixup > 0 or config.cutmix > 0 else None
