"""The optional members of a split, which give a plug-in's data set all that image folders get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from runs import world_of
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ddp_trainer import Datasets, registry
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.images import DataConfig, FileAugmentConfig
from ddp_trainer.data.build import build_datasets, build_loaders
from ddp_trainer.data.dataset import BadImageError, ImageTensors, num_samples
from ddp_trainer.data.loaders import Loaders
from ddp_trainer.data.readers import NO_LABEL

SIDE = 16


@dataclass(kw_only=True)
class TilesConfig(DataConfig):
    name: str = "tiles"
    augment: FileAugmentConfig = field(default_factory=FileAugmentConfig)  # type: ignore[override]


class Tiles(Dataset[tuple[Tensor, int]]):
    """Images whose pixels are the crop: 255 times the draws in the first row, 0 for the center."""

    image_shape = (1, SIDE, SIDE)
    center_crop = 0.75

    def __init__(self, labels: Sequence[int]) -> None:
        self.labels = torch.tensor(labels)
        self.bad: set[int] = set()
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(index, None)

    def read(self, index: int, draws: Sequence[float] | None) -> tuple[Tensor, int]:
        if index in self.bad:
            raise BadImageError("it is torn")
        self.reads.append(index)
        image = torch.zeros(self.image_shape, dtype=torch.uint8)
        if draws is not None:
            image[0, 0, :4] = (torch.tensor(draws) * 255).round().to(torch.uint8)
        return image, int(self.labels[index])

    def path(self, index: int) -> str:
        return f"tile {index}"

    def fingerprint(self) -> str:
        return f"{len(self)} tiles"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Datasets]:
    monkeypatch.setattr(registry, "_choices", {k: dict(v) for k, v in registry._choices.items()})

    def build(train: Dataset[Any], evaluation: Dataset[Any], **options: Any) -> Datasets:
        datasets = Datasets(train=train, eval=evaluation, class_names=["a", "b", "c"])
        registry.register_dataset("tiles", TilesConfig, builder=lambda config: datasets)
        return build_datasets(TilesConfig(**options))

    return build


def loaders(
    datasets: Datasets, config: DataConfig, *, rank: int = 0, world_size: int = 1
) -> Loaders:
    return build_loaders(
        datasets,
        config,
        world=world_of(rank, world_size),
        seed=3,
        global_batch_size=6,
        eval_batch_size=6,
        memory_format=torch.contiguous_format,
    )


def pixels(loader: Any) -> list[Tensor]:
    """Return the pixels that the loader's batches had before normalization."""
    return [(batch.images * 0.25 + 0.5).mul(255).round().to(torch.uint8) for batch in loader]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_crops_reach_read_and_do_not_depend_on_ranks(
    world_size: int, num_workers: int, build: Callable[..., Datasets]
) -> None:
    train = Tiles([0, 1, 2] * 6)
    config = TilesConfig(num_workers=num_workers)
    for epoch in (0, 1):
        draws = []
        for rank in range(world_size):
            ours = loaders(build(train, Tiles([0])), config, rank=rank, world_size=world_size)
            ours.sampler.set_epoch(epoch)
            expected = ours.train.augmentation.draw(18, epoch=epoch)["crops"]
            for positions, images in zip(ours.sampler.positions(), pixels(ours.train), strict=True):
                share = expected[positions]
                assert torch.equal(images[:, 0, 0, :4], (share * 255).round().to(torch.uint8))
                draws += share.tolist()
        assert len({tuple(row) for row in draws}) == 18  # each image has its own crop


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluations_and_an_augmentation_without_crops_see_the_center(
    world_size: int, build: Callable[..., Datasets]
) -> None:
    datasets = build(Tiles([0, 1, 2] * 6), Tiles([0, 1, 2]))
    for rank in range(world_size):
        config = TilesConfig(augment=FileAugmentConfig(random_resized_crop=None))
        ours = loaders(datasets, config, rank=rank, world_size=world_size)
        assert not any(images.any() for images in pixels(ours.train))
        ours = loaders(datasets, TilesConfig(), rank=rank, world_size=world_size)
        assert not any(images.any() for images in pixels(ours.eval))
        assert ours.preprocessing["center_crop"] == 0.75


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_held_out_part_has_the_same_share_of_each_class(
    world_size: int, build: Callable[..., Datasets]
) -> None:
    train = Tiles([0] * 20 + [1] * 10 + [2] * 10)
    datasets = build(train, Tiles([0]), validation_fraction=0.3)
    assert isinstance(datasets.train, Subset)
    assert isinstance(datasets.eval, Subset)
    held_out = list(datasets.eval.indices)
    assert train.labels[held_out].bincount().tolist() == [6, 3, 3]
    assert sorted([*held_out, *datasets.train.indices]) == list(range(40))
    seen: list[int] = []
    crops: list[bool] = []
    for rank in range(world_size):
        ours = loaders(datasets, TilesConfig(num_workers=0), rank=rank, world_size=world_size)
        assert ours.preprocessing["center_crop"] == 0.75
        for batch in ours.eval:
            seen += batch.ids.tolist()
        crops += [bool(images.any()) for images in pixels(ours.train)]
    assert sorted(seen) == list(range(12))
    assert all(crops)  # a part of a data set that can crop crops, too


@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_a_group_is_held_out_whole_or_not_at_all(
    fraction: float, build: Callable[..., Datasets]
) -> None:
    train = Tiles([0, 1, 2] * 20)
    train.groups = torch.tensor([7 * (n // 4) for n in range(59)] + [1])  # type: ignore[attr-defined]
    datasets = build(train, Tiles([0]), validation_fraction=fraction)
    sides = [
        set(train.groups[list(split.indices)].tolist())  # type: ignore[attr-defined, union-attr]
        for split in (datasets.train, datasets.eval)
    ]
    assert not sides[0] & sides[1]
    assert fraction * 60 - 4 < num_samples(datasets.eval) <= fraction * 60
    assert num_samples(datasets.train) + num_samples(datasets.eval) == 60
    with pytest.raises(
        ConfigError, match=r"^data\.validation_fraction=0\.01 of 60 training images"
    ):
        build(train, Tiles([0]), validation_fraction=0.01)
    train.groups = torch.zeros(3)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^data=tiles: train groups must have the shape \[60\]"):
        build(train, Tiles([0]))


def test_shape_and_fingerprint_are_known_without_a_read(build: Callable[..., Datasets]) -> None:
    train = Tiles([0, 1, 2])
    datasets = build(train, train)
    assert datasets.image_shape == (1, SIDE, SIDE)
    assert datasets.fingerprint == Datasets(train, train, ["a", "b", "c"]).fingerprint
    assert datasets.fingerprint != build(train, Tiles([0])).fingerprint
    assert train.reads == []


def test_a_bad_image_is_named_by_its_path(build: Callable[..., Datasets]) -> None:
    train = Tiles([0, 1, 2] * 2)
    datasets = build(train, train)
    train.bad = {4}
    ours = loaders(datasets, TilesConfig())
    [batch] = ours.train
    assert batch.ids[batch.labels == NO_LABEL].tolist() == [4]
    assert ours.bad_samples == [("tile 4", "it is torn")]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0.0, 1.0]), r"train labels must be int64 \[2\] and are torch.float32 \[2\]"),
        (torch.tensor([0]), r"train labels must be int64 \[2\] and are torch.int64 \[1\]"),
        (torch.tensor([0, 3]), r"train labels must be 0 to 2 and are 0 to 3"),
    ],
)
def test_labels_that_do_not_fit_are_one_error(
    labels: Tensor, message: str, build: Callable[..., Datasets], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Tiles([0, 1])
    monkeypatch.setattr(Tiles, "__len__", lambda self: 2)
    train.labels = labels
    with pytest.raises(ConfigError, match=rf"^data=tiles: {message}$"):
        build(train, train)


def test_images_in_memory_are_not_cropped() -> None:
    images = torch.zeros(6, 1, SIDE, SIDE, dtype=torch.uint8)
    split = ImageTensors(images, torch.zeros(6, dtype=torch.int64))
    assert num_samples(split) == 6
    ours = loaders(Datasets(split, split, ["a"]), TilesConfig())
    [batch] = ours.train
    assert batch.images.shape == (6, 1, SIDE, SIDE)
