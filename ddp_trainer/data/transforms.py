"""RandAugment and color jitter of whole batches, without a wait for the device.

Random numbers are drawn on the CPU, as Python numbers. torchvision's functions are used unless they
copy a small tensor to the device, because the host would wait for this copy in each step.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d
from torchvision.transforms.v2 import functional

STRENGTH = 0.3
"""The size of each change, as a share of the largest: torchvision's default, magnitude 9 of 30."""
MAX_SHEAR = 0.3
MAX_TRANSLATION = 150 / 331
"""The largest translation, as a share of the image's side."""
MAX_DEGREES = 30.0
MAX_COLOR_CHANGE = 0.9

Operation = Callable[[Tensor, float], Tensor]
"""Returns changed images. The number is a strength in [-1, 1], or, for `change`, a factor."""


def rand_augment(images: Tensor, num_operations: int, random: np.random.Generator) -> Tensor:
    """Return the images, uint8 [B, 1 or 3, H, W], all changed by the same random operations.

    Source: Cubuk et al., RandAugment, 2019 (arXiv 1909.13719), as in torchvision's RandAugment.
    """
    for _ in range(num_operations):
        operation = OPERATIONS[random.integers(len(OPERATIONS))]
        images = operation(images, STRENGTH if random.random() < 0.5 else -STRENGTH)
    return images


def color_jitter(images: Tensor, amount: float, random: np.random.Generator) -> Tensor:
    """Return the images, uint8 [B, 1 or 3, H, W], with the same random change of all colors.

    Brightness, contrast and saturation are multiplied, in random order, by random factors from
    1 - `amount` to 1 + `amount`.
    """
    for number in random.permutation(len(ADJUSTMENTS)).tolist():
        images = ADJUSTMENTS[number](images, random.uniform(1 - amount, 1 + amount))
    return images


def warp(
    matrix: Callable[[float, int, int], Sequence[Sequence[float]]],
) -> Operation:
    """Return an operation that moves pixels by an affine map.

    matrix: returns ((a, b, c), (d, e, f)) for a strength, height and width. The pixel (x, y) of the
    result is the pixel of the image that is nearest to the point (ax + by + c, dx + ey + f), or
    black if this point is outside of the image. x and y are in pixels from the image's center.
    """

    def operation(images: Tensor, strength: float) -> Tensor:
        height, width = images.shape[-2:]
        x = torch.arange(width, device=images.device) - (width - 1) / 2
        y = torch.arange(height, device=images.device)[:, None] - (height - 1) / 2
        (a, b, c), (d, e, f) = matrix(strength, height, width)
        columns = (a * x + b * y + (c + (width - 1) / 2)).round().long()
        rows = (d * x + e * y + (f + (height - 1) / 2)).round().long()
        near_columns = columns.clamp(0, width - 1)
        near_rows = rows.clamp(0, height - 1)
        is_inside = (near_columns == columns) & (near_rows == rows)
        return images[:, :, near_rows, near_columns] * is_inside

    return operation


def rotation(strength: float, height: int, width: int) -> Sequence[Sequence[float]]:
    """Return the matrix, see `warp`, of a rotation; it is counterclockwise if `strength` > 0."""
    angle = math.radians(strength * MAX_DEGREES)
    return (math.cos(angle), -math.sin(angle), 0), (math.sin(angle), math.cos(angle), 0)


def sharpen(images: Tensor, strength: float) -> Tensor:
    """Return sharper images, or more blurred ones if `strength` < 0.

    The outermost pixels, and images with a side below 3 pixels, stay as they are.
    """
    if min(images.shape[-2:]) < 3:
        return images
    inside = images[..., 1:-1, 1:-1].float()
    # The weights of the 3×3 kernel are 5/13 in the middle and 1/13 elsewhere, as in Pillow.
    blurred = ((9 * avg_pool2d(images.float(), 3, stride=1) + 4 * inside) / 13).round()
    inside.add_(blurred - inside, alpha=-strength * MAX_COLOR_CHANGE).clamp_(0, 255)
    sharpened = images.clone()
    sharpened[..., 1:-1, 1:-1] = inside.to(torch.uint8)
    return sharpened


def change(adjust: Operation) -> Operation:
    """Return an operation that calls `adjust` with the factor 1 + strength × `MAX_COLOR_CHANGE`."""
    return lambda images, strength: adjust(images, 1 + strength * MAX_COLOR_CHANGE)


ADJUSTMENTS = [
    functional.adjust_brightness,
    functional.adjust_contrast,
    functional.adjust_saturation,
]
OPERATIONS: list[Operation] = [
    warp(lambda s, h, w: ((1, MAX_SHEAR * s, MAX_SHEAR * s * h / 2), (0, 1, 0))),
    warp(lambda s, h, w: ((1, 0, 0), (MAX_SHEAR * s, 1, MAX_SHEAR * s * w / 2))),
    warp(lambda s, h, w: ((1, 0, -int(s * MAX_TRANSLATION * w)), (0, 1, 0))),
    warp(lambda s, h, w: ((1, 0, 0), (0, 1, -int(s * MAX_TRANSLATION * h)))),
    warp(rotation),
    sharpen,
    *map(change, ADJUSTMENTS),
    lambda images, _: images,
    lambda images, _: functional.posterize(images, bits=round(8 - 4 * STRENGTH)),
    lambda images, _: functional.solarize(images, threshold=255 * (1 - STRENGTH)),
    lambda images, _: functional.autocontrast(images),
    lambda images, _: functional.equalize(images),
]
"""RandAugment's operations on images, uint8 [B, 1 or 3, H, W].

In order: shear along x and y, translate along x and y, rotate, sharpen, brightness, contrast,
saturation, no change, posterize, solarize, autocontrast, equalize. The last five ignore strength.
"""
