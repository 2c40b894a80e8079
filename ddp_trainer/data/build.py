"""Builds and checks data sets, and holds out a validation split."""

import math
from collections.abc import Sequence, Sized

import torch
from torch import Tensor
from torch.utils.data import Subset

from ddp_trainer import registry
from ddp_trainer.config.data import DataConfig
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.dataset import (
    Datasets,
    ImageTensors,
    Split,
    num_samples,
    per_sample,
    shape_of,
)
from ddp_trainer.distributed.seeding import generator


def build_datasets(config: DataConfig) -> Datasets:
    """Return the data set that `config` chooses, with a validation split if `config` asks for one.

    Raises ConfigError if a file is missing or damaged, or the images do not fit the config.
    """
    try:
        datasets = registry.build("data", config, returns=Datasets)
        check(datasets, config)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"data={config.name} does not fit into the memory of this host: use a larger host"
        ) from error

    if config.validation_fraction:
        datasets = hold_out(datasets, config.validation_fraction)
    return datasets


def check(datasets: Datasets, config: DataConfig) -> None:
    """Check that the data set is valid and that its images fit `config`; ConfigError if not."""
    num_classes = len(datasets.class_names)
    try:
        check_split(datasets.train, "train", num_classes=num_classes)
        check_split(datasets.eval, "eval", num_classes=num_classes)
        shape = shape_of(datasets.eval)
        if shape != datasets.image_shape:
            raise ValueError(
                f"images must have one shape: train has {datasets.image_shape} and eval {shape}"
            )
    except (RuntimeError, ValueError) as error:
        root = config.description["root"]
        name = f"data={config.name}" if root is None else f"data={config.name} data.root={root}"
        raise ConfigError(f"{name}: {error}") from error

    channels, height, width = datasets.image_shape
    require(
        len(config.mean) in (1, channels),
        f"data.mean={config.mean} and data.std must each have one value per channel, or one value"
        f" for all: the number of channels of data={config.name} is {channels}",
    )
    config.augment.check_images(channels, height, width)


def check_split(split: Split, name: str, *, num_classes: int) -> None:
    """Check the length, and the images and labels that are in memory; ValueError if not valid."""
    if not isinstance(split, Sized):
        raise ValueError(f"{name} has no length: it must be ImageTensors or a map-style data set")
    if len(split) == 0:
        raise ValueError(f"{name} has no sample")

    count = len(split)
    if isinstance(split, ImageTensors):
        images = split.images
        count = len(images)
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"{name} images must be uint8 [N, C, H, W] and are {images.dtype}"
                f" {list(images.shape)}"
            )
    labels = per_sample(split, "labels")
    if labels is not None:
        check_labels(labels, name, count=count, num_classes=num_classes)
    groups = per_sample(split, "groups")
    if groups is not None and groups.shape != (count,):
        raise ValueError(f"{name} groups must have the shape [{count}], not {list(groups.shape)}")


def check_labels(labels: Tensor, name: str, *, count: int, num_classes: int) -> None:
    """Check that there are `count` labels, int64 from 0 to `num_classes` - 1; ValueError if not."""
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(
            f"{name} labels must be int64 [{count}] and are {labels.dtype} {list(labels.shape)}"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"{name} labels must be 0 to {num_classes - 1} and are {labels.min()} to {labels.max()}"
        )


def hold_out(datasets: Datasets, fraction: float) -> Datasets:
    """Return `Datasets` whose evaluation split is a random part of the training split.

    The part is the same for every seed. It is `fraction` of a split in memory. Of a streamed split
    with ``groups``, it has whole groups, at most `fraction` of the samples; with ``labels``, it has
    the same share of each class, to within one image, and never a whole class.
    """
    split = datasets.train
    groups = per_sample(split, "groups")
    labels = None if isinstance(split, ImageTensors) else per_sample(split, "labels")
    count = num_samples(split)
    if groups is not None:
        held_out = choose_groups(groups, fraction)
    else:
        held_out = choose_samples(torch.zeros(count) if labels is None else labels, fraction)
    require(
        bool(held_out.any()),
        f"data.validation_fraction={fraction} of {count} training images holds out no image: raise"
        " data.validation_fraction, or, if every class has a single image, add images",
    )
    return Datasets(
        train=select(split, (~held_out).nonzero()[:, 0]),
        eval=select(split, held_out.nonzero()[:, 0]),
        class_names=datasets.class_names,
    )


def choose_groups(groups: Tensor, fraction: float) -> Tensor:
    """Return a mask of the samples, bool [N], that covers random whole groups. groups: [N]."""
    _, numbers, sizes = groups.unique(return_inverse=True, return_counts=True)
    free = math.floor(fraction * len(groups))
    chosen: list[int] = []
    for group in torch.randperm(len(sizes), generator=generator(0, purpose="validation")).tolist():
        size = int(sizes[group])
        if size <= free:
            free -= size
            chosen.append(group)
    return torch.isin(numbers, torch.tensor(chosen, dtype=torch.int64))


def choose_samples(labels: Tensor, fraction: float) -> Tensor:
    """Return a mask of the samples, bool [N], that covers `fraction` of each class. labels: [N]."""
    order = torch.randperm(len(labels), generator=generator(0, purpose="validation"))
    classes = [order[labels[order] == label] for label in labels.unique()]
    mask = torch.zeros(len(labels), dtype=torch.bool)
    counts = held_out_counts([len(samples) for samples in classes], fraction)
    for samples, count in zip(classes, counts, strict=True):
        mask[samples[:count]] = True
    return mask


def held_out_counts(sizes: Sequence[int], fraction: float) -> list[int]:
    """Return `fraction` of each size, rounded so that the sum is right, and less than the size."""
    counts: list[int] = []
    total = 0
    for size in sizes:
        total += size
        missing = round(fraction * total) - sum(counts)
        highest = min(missing, math.ceil(fraction * size), size - 1)
        counts.append(max(math.floor(fraction * size), highest))
    return counts


def select(split: Split, ids: Tensor) -> Split:
    """Return the part of `split` with the samples `ids`, int64 [N]."""
    if isinstance(split, ImageTensors):
        return ImageTensors(split.images[ids], split.labels[ids])
    return Subset(split, ids.tolist())
