"""Mixup and CutMix: each image is mixed with the next one of the global batch."""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import one_hot

from ddp_trainer.data.augmentation import Augmentation


class Mix(NamedTuple):
    """The parameters by which all pairs of images of a global batch are mixed."""

    weight: float
    """The share, in [0, 1], of the first image of a pair."""
    box: tuple[int, int, int, int] | None
    """The part that CutMix replaces: top, left, bottom, right in pixels. None: mixup, the mean of
    both images, weighted by `weight`.
    """


def draw_mix(augmentation: Augmentation, *, epoch: int, step: int) -> Mix:
    """Return random parameters for a global batch, which depend on (seed, epoch, step) alone.

    If both mixup and CutMix are configured, each is chosen with probability 0.5.

    Source: Zhang et al., mixup, 2017 (arXiv 1710.09412); Yun et al., CutMix, 2019 (arXiv
    1905.04899).
    """
    config = augmentation.config
    chance = augmentation.random("mix", epoch=epoch, step=step)
    is_cutmix = config.mixup == 0 or (config.cutmix > 0 and chance.random() < 0.5)
    alpha = config.cutmix if is_cutmix else config.mixup
    weight = float(chance.beta(alpha, alpha))
    if not is_cutmix:
        return Mix(weight, None)

    scale = (1 - weight) ** 0.5
    top, bottom = span(chance.random(), scale, augmentation.height)
    left, right = span(chance.random(), scale, augmentation.width)
    cut = (bottom - top) * (right - left) / (augmentation.height * augmentation.width)
    return Mix(1 - cut, (top, left, bottom, right))


def mix_pairs(
    images: Tensor, labels: Tensor, mix: Mix, *, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return mixed images, [B, C, H, W], and class probabilities, float32 [B, classes].

    images: [2 · B, C, H, W], the images of this rank, then the images to mix them with; labels:
    int64 [2 · B], in the same order. All probabilities of a pair are 0 if one of its labels is
    negative (`NO_LABEL`, the label of a bad sample).
    """
    first, second = images.chunk(2)
    if mix.box is None:
        mixed = first.lerp(second, 1 - mix.weight)
    else:
        top, left, bottom, right = mix.box
        mixed = first.clone()
        mixed[:, :, top:bottom, left:right] = second[:, :, top:bottom, left:right]
    own, other = one_hot(labels.clamp(min=0), num_classes).float().chunk(2)
    known = (labels >= 0).view(2, -1).all(0)[:, None]
    return mixed, own.lerp(other, 1 - mix.weight) * known


def span(center: float, scale: float, size: int) -> tuple[int, int]:
    """Return the first pixel and the exclusive end of an interval on a side of `size` pixels.

    center, scale: center and length of the interval, as shares of the side. The interval is cut off
    at both ends of the side.
    """
    begin = round(max(center - scale / 2, 0) * size)
    return begin, round(min(center + scale / 2, 1) * size)
