"""Loaders on fake CUDA tensors, which compute shapes and devices without a GPU.

A mix of devices raises an error, and so does an operation that waits for a value from the GPU.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from runs import world_of
from test_loader import image_set
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)

from ddp_trainer.config.images import AugmentConfig, DataConfig, FileAugmentConfig
from ddp_trainer.data import transforms
from ddp_trainer.data.augmentation import Augmentation
from ddp_trainer.data.build import build_loaders
from ddp_trainer.data.dataset import Datasets, ImageTensors
from ddp_trainer.data.loaders import Batch, Loaders
from ddp_trainer.data.readers import SampleReader

CUDA = torch.device("cuda", 0)
NUM_CLASSES = 10
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "crop, flip and erase": {
        "random_crop_padding": 1,
        "random_hflip": True,
        "random_erasing": 0.5,
    },
    "rand_augment": {"rand_augment": 3},
    "color_jitter": {"color_jitter": 0.4},
    "mixup": {"mixup": 0.4},
    "cutmix": {"cutmix": 1.0},
    "all": {
        "random_crop_padding": 2,
        "random_hflip": True,
        "random_erasing": 0.5,
        "rand_augment": 2,
        "color_jitter": 0.4,
        "mixup": 0.2,
        "cutmix": 1.0,
    },
}


def color_images(count: int) -> ImageTensors:
    split = image_set(count)
    return ImageTensors(split.images[:, :1].repeat(1, 3, 1, 1), split.labels)


class FilesInMemory(torch.utils.data.Dataset[Any]):
    """A streamed data set that can crop at random."""

    image_shape = (3, 5, 7)

    def __init__(self) -> None:
        self.split = color_images(23)

    def __len__(self) -> int:
        return len(self.split)

    def read(self, index: int, draws: Any) -> tuple[Tensor, int]:
        return self.split.images[index], int(self.split.labels[index])

    def fingerprint(self) -> str:
        return "23"


def cuda_loaders(split: Any, options: dict[str, Any], *, rank: int, world_size: int) -> Loaders:
    config = DataConfig(
        name="fake", mean=[0.5] * 3, std=[0.25] * 3, augment=FileAugmentConfig(**options)
    )
    datasets = Datasets(train=split, eval=split, class_names=["class"] * NUM_CLASSES)
    with FakeTensorMode(allow_non_fake_inputs=True):
        loaders = build_loaders(
            datasets,
            config,
            world=world_of(rank, world_size, device="cuda:0"),
            seed=3,
            global_batch_size=6,
            eval_batch_size=6,
            memory_format=torch.channels_last,
        )
    return loaders


def read_fake(
    reader: SampleReader, batches: Iterable[Tensor], crops: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches as the reader's threads write them: on the CPU. Fake ids have no values."""
    for ids, draws in zip(batches, crops, strict=True):
        assert (ids.device.type, draws.device.type) == ("cpu", "cpu")
        images = torch.zeros(len(ids), *reader.image_shape, dtype=torch.uint8)
        yield images, torch.zeros(len(ids), dtype=torch.int64)


def fake_batches(loaders: Loaders) -> list[Batch]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return list(loaders.train)


def check(batches: list[Batch], *, mixed: bool, size: int) -> None:
    assert len(batches) == 3
    for batch in batches:
        assert all(isinstance(part, FakeTensor) and part.device == CUDA for part in batch)
        assert batch.images.shape == (size, 3, 5, 7)
        assert batch.labels.shape == ((size, NUM_CLASSES) if mixed else (size,))
        assert batch.ids.shape == (size,)


@pytest.mark.parametrize("is_resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_batches_need_no_value_from_the_gpu_and_no_other_device(
    kind: str, world_size: int, is_resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SampleReader, "read", read_fake)
    split = color_images(23) if is_resident else FilesInMemory()
    mixed = any(KINDS[kind].get(name) for name in ("mixup", "cutmix"))
    for rank in range(world_size):
        loaders = cuda_loaders(split, KINDS[kind], rank=rank, world_size=world_size)
        check(fake_batches(loaders), mixed=mixed, size=6 // world_size)


@pytest.mark.parametrize("number", range(len(transforms.OPERATIONS)))
def test_no_operation_of_rand_augment_waits_or_copies_to_the_gpu(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    make = torch.tensor

    def tensor(*args: Any, **options: Any) -> Tensor:
        copies.append(args)
        return make(*args, **options)

    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.zeros(4, 3, 9, 9, dtype=torch.uint8, device=CUDA)
        monkeypatch.setattr(torch, "tensor", tensor)  # on a GPU, a copy that the host waits for
        for strength in (-transforms.STRENGTH, transforms.STRENGTH):
            changed = transforms.OPERATIONS[number](images, strength)
            assert (changed.shape, changed.dtype, changed.device) == (
                images.shape,
                torch.uint8,
                CUDA,
            )
    assert copies == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_batches_are_on_the_gpu(world_size: int) -> None:
    for rank in range(world_size):
        loaders = cuda_loaders(color_images(23), {}, rank=rank, world_size=world_size)
        with FakeTensorMode(allow_non_fake_inputs=True):
            batches = list(loaders.eval)
        assert all(part.device == CUDA for batch in batches for part in batch)


def wait(images: Tensor) -> Tensor:
    images.max().item()
    return images


def mix_devices(images: Tensor) -> Tensor:
    return images + torch.ones(images.shape)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (wait, DataDependentOutputException, "_local_scalar_dense"),
        (mix_devices, RuntimeError, "two (different )?devices,? cuda:0(,| and) cpu"),
    ],
)
def test_a_wait_and_a_mix_of_devices_are_found(
    fault: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Augmentation, "crop", lambda self, images, params: fault(images))
    loaders = cuda_loaders(color_images(23), {}, rank=0, world_size=1)
    with pytest.raises(error, match=message):
        fake_batches(loaders)


def test_every_augmentation_is_tested() -> None:
    assert set(KINDS["all"]) == set(AugmentConfig.__dataclass_fields__)
