"""Augmentation: drawn for the whole epoch alike on all ranks, and equal to a loop over images."""

import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from ddp_trainer.config.images import AugmentConfig
from ddp_trainer.data.augmentation import Augmentation

EVERYTHING = AugmentConfig(random_crop_padding=2, random_hflip=True, random_erasing=0.5)
HEIGHT = 6
WIDTH = 9


def augmentation(config: AugmentConfig = EVERYTHING, *, seed: int = 0) -> Augmentation:
    return Augmentation(config, height=HEIGHT, width=WIDTH, seed=seed)


def tensors(draws: dict[str, Tensor]) -> list[Tensor]:
    return [draws["offsets"], draws["flips"], draws["boxes"]]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def change_one_by_one(
    images: Tensor, ids: Tensor, draws: dict[str, Tensor], config: AugmentConfig
) -> Tensor:
    """Return what training sees of uint8 images, without normalisation, by loops over images, rows
    and columns.
    """
    pad = config.random_crop_padding
    changed = []
    for n, image in enumerate(images[ids].tolist()):
        new = torch.zeros(len(image), HEIGHT, WIDTH)
        for row in range(HEIGHT):
            for column in range(WIDTH):
                from_column = (
                    WIDTH - 1 - column if "flips" in draws and draws["flips"][n] else column
                )
                dy, dx = (0, 0) if "offsets" not in draws else (draws["offsets"][n] - pad).tolist()
                y = row + dy
                x = from_column + dx
                top, left, bottom, right = (
                    (0, 0, 0, 0) if "boxes" not in draws else draws["boxes"][n].tolist()
                )
                blank = top <= row < bottom and left <= column < right
                if 0 <= y < HEIGHT and 0 <= x < WIDTH and not blank:
                    new[:, row, column] = torch.tensor([channel[y][x] for channel in image])
        changed.append(new)
    return torch.stack(changed)


configs = st.builds(
    AugmentConfig,
    random_crop_padding=st.integers(0, 5),
    random_hflip=st.booleans(),
    random_erasing=st.sampled_from([0.0, 0.5, 1.0]),
)


@settings(max_examples=25, deadline=None)
@given(configs, st.integers(1, 3), st.integers(0, 1000))
@example(AugmentConfig(), 1, 0)
def test_a_batch_is_what_a_loop_over_images_gives(
    config: AugmentConfig, channels: int, seed: int
) -> None:
    augment = augmentation(config, seed=seed)
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(
        1, 256, (8, channels, HEIGHT, WIDTH), dtype=torch.uint8, generator=random
    )
    ids = torch.randperm(8, generator=random)[:5]
    draws = augment.draw(5, epoch=0)
    batch = augment.erase(augment.crop(images[ids], draws).float(), draws)
    assert torch.equal(batch, change_one_by_one(images, ids, draws, config))


def test_draws_are_a_function_of_seed_epoch_and_position() -> None:
    assert equal(augmentation().draw(50, epoch=3), augmentation().draw(50, epoch=3))
    for other in (augmentation().draw(50, epoch=4), augmentation(seed=1).draw(50, epoch=3)):
        pairs = zip(tensors(augmentation().draw(50, epoch=3)), tensors(other), strict=True)
        assert not any(torch.equal(a, b) for a, b in pairs)


def test_one_kind_of_draw_does_not_depend_on_the_others() -> None:
    everything = augmentation().draw(50, epoch=0)
    crop = augmentation(AugmentConfig(random_crop_padding=2)).draw(50, epoch=0)
    flip = augmentation(AugmentConfig(random_hflip=True)).draw(50, epoch=0)
    erase = augmentation(AugmentConfig(random_erasing=0.5)).draw(50, epoch=0)
    assert equal(everything, crop | flip | erase)
    assert (list(crop), list(flip)) == (["offsets"], ["flips"])


def test_crops_reach_every_offset_and_half_of_the_images_are_mirrored() -> None:
    offsets, flips, _ = tensors(augmentation().draw(20_000, epoch=0))
    counts = torch.zeros(5, 5).index_put_(
        (offsets[:, 0], offsets[:, 1]), torch.ones(20_000), accumulate=True
    )
    assert (counts / 20_000 - 1 / 25).abs().max() < 0.007  # 5 standard deviations
    assert abs(float(flips.double().mean()) - 0.5) < 0.018


def test_rectangles_are_as_often_and_as_large_as_configured_and_inside_the_image() -> None:
    augment = Augmentation(AugmentConfig(random_erasing=0.3), height=32, width=32, seed=0)
    boxes = augment.draw(20_000, epoch=0)["boxes"]
    top, left, bottom, right = boxes.unbind(1)
    erased = bottom > top
    assert abs(float(erased.double().mean()) - 0.3) < 0.017
    assert int(boxes.min()) == 0
    assert int(bottom.max()) == 32
    assert int(right.max()) == 32
    area = ((bottom - top) * (right - left))[erased] / 32**2
    assert 0.012 < float(area.min()) < 0.03  # from 2 % on, rounded to pixels
    assert 0.31 < float(area.max()) < 0.36
    assert abs(float(area.mean()) - 0.175) < 0.01


def test_a_rectangle_of_an_odd_aspect_stays_inside_a_narrow_image() -> None:
    augment = Augmentation(AugmentConfig(random_erasing=1.0), height=3, width=40, seed=0)
    boxes = augment.draw(5000, epoch=0)["boxes"]
    corners = boxes[:, :2]
    opposite = boxes[:, 2:]
    assert bool(((corners >= 0) & (corners < opposite) & (opposite <= torch.tensor([3, 40]))).all())
