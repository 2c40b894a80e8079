"""RandAugment and color jitter: torchvision's operations, drawn as torchvision draws them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from ddp_trainer.data import transforms
from ddp_trainer.data.transforms import ADJUSTMENTS, OPERATIONS, color_jitter, rand_augment

NAMES = (
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Sharpness",
    "Brightness",
    "Contrast",
    "Color",
    "Identity",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)
"""torchvision's names of `OPERATIONS`."""
SIZES = ((8, 8), (28, 28), (17, 30), (2, 5))


def images_of(height: int, width: int, channels: int) -> Tensor:
    random = torch.Generator().manual_seed(height)
    shape = (4, channels, height, width)
    # far apart, so that another pixel is not within the tolerance
    images = 8 * torch.randint(32, shape, dtype=torch.uint8, generator=random)
    images[1] = 77  # one color, which some operations divide by
    return images


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_operation_is_that_of_torchvision(name: str, channels: int, sign: int) -> None:
    theirs = v2.RandAugment()
    for height, width in SIZES:
        images = images_of(height, width, channels)
        magnitudes, is_signed = theirs._AUGMENTATION_SPACE[name]
        levels = magnitudes(theirs.num_magnitude_bins, height, width)
        magnitude = 0.0 if levels is None else float(levels[theirs.magnitude])
        expected: Any = theirs._apply_image_or_video_transform(
            images.clone(),
            name,
            magnitude * sign if is_signed else magnitude,
            interpolation=theirs.interpolation,
            fill=theirs._fill,
        )
        changed = OPERATIONS[NAMES.index(name)](images, sign * transforms.STRENGTH)
        # torchvision rounds magnitudes to float32, so that a value just below a whole number may be
        # one above
        assert (changed.int() - expected.int()).abs().max() <= 1, (height, width)


def test_every_operation_of_torchvision_is_drawn_equally_often_with_both_signs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(NAMES) == set(v2.RandAugment._AUGMENTATION_SPACE)
    drawn: Counter[tuple[str, float]] = Counter()

    def record(name: str) -> object:
        return lambda images, strength: drawn.update([(name, strength)]) or images

    monkeypatch.setattr(transforms, "OPERATIONS", [record(name) for name in NAMES])
    rand_augment(torch.zeros(1, 1, 1, 1), 14_000, np.random.default_rng(0))
    assert len(drawn) == 2 * len(NAMES)
    assert all(abs(count - 500) < 5 * 500**0.5 for count in drawn.values())


def test_color_jitter_changes_three_properties_in_random_order_by_factors_in_a_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders: Counter[tuple[int, ...]] = Counter()
    factors: list[float] = []
    order: list[int] = []

    def record(number: int) -> object:
        def adjust(images: Tensor, factor: float) -> Tensor:
            order.append(number)
            factors.append(factor)
            return images

        return adjust

    monkeypatch.setattr(transforms, "ADJUSTMENTS", [record(number) for number in range(3)])
    for seed in range(1200):
        order.clear()
        color_jitter(torch.zeros(1, 1, 1, 1), 0.4, np.random.default_rng(seed))
        orders[tuple(order)] += 1
    assert len(orders) == 6
    assert all(abs(count - 200) < 5 * 200**0.5 for count in orders.values())
    assert 0.6 <= min(factors) < 0.601
    assert 1.399 < max(factors) <= 1.4
    assert len(ADJUSTMENTS) == 3
