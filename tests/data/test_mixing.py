"""Mixup, CutMix, RandAugment and color jitter: functions of (seed, epoch, step), the same on any
number of ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    TINY,
    assert_bitwise,
    newest_checkpoint,
    records,
    train_all,
    train_on,
    trained_state,
)
from test_loader import CPU, image_set
from torch.nn.functional import cross_entropy

from ddp_trainer.config.images import AugmentConfig
from ddp_trainer.config.losses import CrossEntropyConfig
from ddp_trainer.data.augmentation import Augmentation, Normalize
from ddp_trainer.data.loaders import Batch, ResidentReader, TrainLoader
from ddp_trainer.data.mixing import Mix, draw_mix, mix_pairs
from ddp_trainer.data.readers import NO_LABEL
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.optim.losses import build_cross_entropy
from ddp_trainer.training.metrics import sum_of_losses

HEIGHT = 5
WIDTH = 7
NUM_CLASSES = 10
NORMALIZE = Normalize([0.5], [0.25], device=CPU, memory_format=torch.channels_last)
KINDS = {
    "mixup": {"mixup": 0.4},
    "cutmix": {"cutmix": 1.0},
    "both": {"mixup": 0.2, "cutmix": 1.0, "random_hflip": True},
    "rand_augment": {"rand_augment": 2},
    "color_jitter": {"color_jitter": 0.4},
}


def batches(
    options: dict[str, Any], *, rank: int = 0, world_size: int = 1, epoch: int = 1, step: int = 0
) -> list[Batch]:
    config = AugmentConfig(**options)
    images = image_set(23)
    # color transforms need one or three channels
    images.images = images.images[:, :1].repeat(1, 3, 1, 1)
    sampler = GlobalBatchSampler(23, global_batch_size=6, world_size=world_size, rank=rank, seed=3)
    sampler.set_epoch(epoch, step)
    return list(
        TrainLoader(
            ResidentReader(images, device=CPU),
            sampler=sampler,
            augmentation=Augmentation(config, height=HEIGHT, width=WIDTH, seed=3),
            num_classes=NUM_CLASSES,
            normalize=NORMALIZE,
            device=CPU,
        )
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_batches_do_not_depend_on_the_number_of_ranks(kind: str, world_size: int) -> None:
    whole = batches(KINDS[kind])
    assert len(whole) == 3
    for rank in range(world_size):
        for step in (0, 2):
            shares = batches(KINDS[kind], rank=rank, world_size=world_size, step=step)
            for share, expected in zip(shares, whole[step:], strict=True):
                assert torch.equal(share.ids, expected.ids[rank::world_size])
                torch.testing.assert_close(
                    share.images, expected.images[rank::world_size], rtol=0, atol=0
                )
                torch.testing.assert_close(
                    share.labels, expected.labels[rank::world_size], rtol=0, atol=0
                )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, "erase"])
def test_images_have_the_memory_format_of_the_model(kind: str, world_size: int) -> None:
    options = {"random_crop_padding": 1, "random_hflip": True, "random_erasing": 0.5}
    for batch in batches(KINDS.get(kind, options), world_size=world_size):
        assert batch.images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_and_epoch_is_drawn_anew(kind: str) -> None:
    first, again, other = (batches(KINDS[kind], epoch=epoch) for epoch in (1, 1, 2))
    plain = batches({"random_hflip": "random_hflip" in KINDS[kind]})
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a.images, b.images) for a, b in zip(first, other, strict=True))
    assert not all(torch.equal(a.images, b.images) for a, b in zip(first, plain, strict=True))


def test_an_image_is_mixed_with_the_next_and_so_are_their_labels() -> None:
    augmentation = Augmentation(AugmentConfig(mixup=0.4), height=HEIGHT, width=WIDTH, seed=3)
    for step, (mixed, plain) in enumerate(zip(batches(KINDS["mixup"]), batches({}), strict=True)):
        weight = draw_mix(augmentation, epoch=1, step=step).weight
        for place in range(6):
            other = (place + 1) % 6
            expected = weight * plain.images[place] + (1 - weight) * plain.images[other]
            torch.testing.assert_close(mixed.images[place], expected)
            shares = torch.zeros(NUM_CLASSES)
            shares[plain.labels[place]] += weight
            shares[plain.labels[other]] += 1 - weight
            torch.testing.assert_close(mixed.labels[place], shares)


def test_a_cut_part_is_that_of_the_next_image_and_its_area_the_share_of_its_label() -> None:
    augmentation = Augmentation(AugmentConfig(cutmix=1.0), height=HEIGHT, width=WIDTH, seed=3)
    for step, (mixed, plain) in enumerate(zip(batches(KINDS["cutmix"]), batches({}), strict=True)):
        mix = draw_mix(augmentation, epoch=1, step=step)
        assert mix.box is not None
        top, left, bottom, right = mix.box
        assert 0 <= top <= bottom <= HEIGHT
        assert 0 <= left <= right <= WIDTH
        inside = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert mix.weight == pytest.approx(1 - inside.float().mean().item())
        assert torch.equal(
            mixed.images, torch.where(inside, plain.images.roll(-1, 0), plain.images)
        )


def test_shares_have_the_configured_distribution() -> None:
    config = AugmentConfig(mixup=0.4, cutmix=1.0)
    augmentation = Augmentation(config, height=200, width=100, seed=0)
    mixes = [draw_mix(augmentation, epoch=0, step=step) for step in range(4000)]
    added = torch.tensor([mix.weight for mix in mixes if mix.box is None])
    assert len(added) == pytest.approx(2000, abs=200)
    assert added.mean() == pytest.approx(0.5, abs=0.03)
    assert added.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.01)  # of beta(a, a)


def test_a_pair_with_a_bad_image_counts_as_none() -> None:
    labels = torch.tensor([0, NO_LABEL, 2]), torch.tensor([1, 2, NO_LABEL])
    _, shares = mix_pairs(torch.zeros(6, 1, 2, 2), torch.cat(labels), Mix(0.3, None), num_classes=3)
    assert shares.sum(1).tolist() == pytest.approx([1, 0, 0])
    logits = torch.randn(3, 3)
    for smoothing in (0.0, 0.3):
        expected = cross_entropy(logits[:1], shares[:1], reduction="sum", label_smoothing=smoothing)
        config = CrossEntropyConfig(label_smoothing=smoothing)
        loss = build_cross_entropy(config, class_counts=None)
        torch.testing.assert_close(sum_of_losses(loss, logits, shares), expected)


def test_transforms_leave_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    batches({"rand_augment": 2, "color_jitter": 0.4})
    assert torch.equal(torch.rand(3), expected)


ALL = (
    "data.augment.mixup=0.2",
    "data.augment.cutmix=1",
    "data.augment.rand_augment=1",
    "loss.label_smoothing=0.1",
    "data.augment.color_jitter=0.2",
)


def test_a_run_with_all_of_them_resumes_and_does_not_depend_on_ranks(tmp_path: Path) -> None:
    common = (*TINY, *ALL, f"output_dir={tmp_path}")
    train_all(
        2,
        [(*common, "name=whole"), (*common, "name=parts", "max_steps=5"), (*common, "name=parts")],
    )
    assert_bitwise(trained_state(tmp_path / "whole"), trained_state(tmp_path / "parts"))
    train_on(3, *common, "name=three")
    torch.testing.assert_close(
        newest_checkpoint(tmp_path / "whole")["model"],
        newest_checkpoint(tmp_path / "three")["model"],
        rtol=1e-4,
        atol=1e-5,
    )
    losses = [record["train/loss"] for record in records(tmp_path / "whole", "train/loss")]
    assert 1.5 < losses[-1] < 3
