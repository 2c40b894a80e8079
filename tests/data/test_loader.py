"""Batches from memory: normalized, augmented, each evaluation sample once."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from runs import world_of

from ddp_trainer.config.images import AugmentConfig
from ddp_trainer.data.augmentation import Augmentation, Normalize
from ddp_trainer.data.dataset import ImageTensors
from ddp_trainer.data.loaders import EvaluationLoader, ResidentReader, TrainLoader
from ddp_trainer.data.sampler import GlobalBatchSampler

CPU = torch.device("cpu")
MEAN = [0.4, 0.5]
STD = [0.2, 0.3]


def image_set(count: int) -> ImageTensors:
    random = torch.Generator().manual_seed(count)
    images = torch.randint(256, (count, 2, 5, 7), dtype=torch.uint8, generator=random)
    return ImageTensors(images, torch.randint(10, (count,), generator=random))


def normalize(memory_format: torch.memory_format = torch.contiguous_format) -> Normalize:
    return Normalize(MEAN, STD, device=CPU, memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_pixels_are_scaled_to_one_and_lose_mean_and_deviation(
    memory_format: torch.memory_format,
) -> None:
    pixels = image_set(4).images
    images = normalize(memory_format)(pixels)
    mean = torch.tensor(MEAN).view(2, 1, 1)
    std = torch.tensor(STD).view(2, 1, 1)
    torch.testing.assert_close(images, (pixels / 255 - mean) / std)
    assert images.is_contiguous(memory_format=memory_format)


def resident(
    images: ImageTensors, *, rank: int = 0, world_size: int = 1, batch: int = 7
) -> TrainLoader:
    return TrainLoader(
        ResidentReader(images, device=CPU),
        sampler=GlobalBatchSampler(
            len(images),
            global_batch_size=batch,
            world_size=world_size,
            rank=rank,
            seed=0,
        ),
        augmentation=Augmentation(
            AugmentConfig(random_crop_padding=1, random_hflip=True, random_erasing=0.5),
            height=5,
            width=7,
            seed=0,
        ),
        normalize=normalize(),
        device=CPU,
        num_classes=10,
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_batches_of_all_ranks_are_the_slices_of_the_global_batches(world_size: int) -> None:
    images = image_set(23)
    ranks = [resident(images, rank=rank, world_size=world_size) for rank in range(world_size)]
    for whole, *shares in zip(resident(images), *ranks, strict=True):
        for rank, share in enumerate(shares):
            assert torch.equal(share.ids, whole.ids[rank::world_size])
            assert torch.equal(share.labels, images.labels[share.ids])
            assert torch.equal(share.images, whole.images[rank::world_size])


def test_from_the_cursor_on_the_same_images_come() -> None:
    loader = resident(image_set(23))
    loader.sampler.set_epoch(4)
    whole = list(loader)
    loader.sampler.set_epoch(4, 2)
    (rest,) = loader
    assert torch.equal(rest.images, whole[2].images)
    assert torch.equal(rest.ids, whole[2].ids)


def test_the_same_image_looks_different_in_another_epoch() -> None:
    loader = resident(image_set(7))
    (first,) = loader
    loader.sampler.set_epoch(1)
    (second,) = loader
    assert not torch.equal(first.images[first.ids.argsort()], second.images[second.ids.argsort()])


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 30), st.integers(1, 7))
def test_each_evaluation_sample_comes_once_over_all_ranks(
    count: int, batch_size: int, world_size: int
) -> None:
    images = image_set(count)
    seen: list[int] = []
    for rank in range(world_size):
        reader = ResidentReader(images, device=CPU)
        loader = EvaluationLoader(
            reader, normalize(), world_of(rank, world_size), batch_size=batch_size
        )
        mine: list[int] = []
        for batch in loader:
            mine += batch.ids.tolist()
            assert len(batch.ids) <= max(1, batch_size // world_size)
            assert torch.equal(batch.labels, images.labels[batch.ids])
            assert torch.equal(batch.images, normalize()(images.images[batch.ids]))
        assert mine == list(range(count))[rank::world_size]
        seen += mine
    assert sorted(seen) == list(range(count))
