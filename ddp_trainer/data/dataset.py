"""Data sets: their splits and samples, the held-out validation split, the fingerprint."""

import hashlib
import math
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ddp_trainer import registry
from ddp_trainer.config.data import DataConfig
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.distributed.seeding import generator


@dataclass(slots=True)
class ImageTensors:
    """A split in memory: images, uint8 [N, C, H, W] in 0 … 255, and labels, int64 [N].

    A run copies both to its device (`ResidentReader`).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


Shape = tuple[int, int, int]
"""Channels, height and width of an image."""
Split = ImageTensors | Dataset[Any]
"""Images in memory, or a map-style data set, whose samples are streamed.

A sample is (uint8 [C, H, W] tensor or PIL image, int).

A map-style data set may also have these members, which are found by name:

- ``read(index, draws)`` returns a sample as indexing does, with a random crop that the four numbers
  `draws` in [0, 1) choose, or with the center crop if `draws` is None;
- ``labels``, a tensor int64 [N]: a validation split then has the same share of each class;
- ``groups``, a tensor [N]: samples of one group, for example of one patient, are then either all in
  the validation split or all in the training split;
- ``path(index)`` returns the path of a sample's file, for messages;
- ``image_shape``: channels, height and width of all images, so that none is read for it;
- ``fingerprint()`` returns a text that identifies the samples;
- ``center_crop``: the side of the center crop, divided by that of the largest possible crop.
"""


class BadImageError(Exception):
    """An image is empty, truncated, too large or not an image; the message says why.

    Data sets raise it for a sample that the key data.on_bad_image may leave out.
    """


class BadSampleError(RuntimeError):
    """The data set raised `BadImageError` for a sample; ``__cause__`` is that error."""


@dataclass
class Datasets:
    """The training split, the split to evaluate on, and the names of the classes."""

    train: Split
    eval: Split
    class_names: Sequence[str]

    @cached_property
    def image_shape(self) -> Shape:
        """Channels, height and width of the first training image."""
        return shape_of(self.train)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the samples.

        It covers all bytes of a split in memory. Of a streamed split, it covers the method
        ``fingerprint``, or without one the length and three samples.
        """
        digest = hashlib.sha256(repr(list(self.class_names)).encode())
        for split in (self.train, self.eval):
            for part in fingerprint_parts(split):
                digest.update(part)
        return digest.hexdigest()

    def check(self) -> None:
        """Check that both splits are valid, and that their images have one shape.

        Raises:
            ValueError: a check fails. RuntimeError: the first image cannot be read.
        """
        check_split(self.train, "train", num_classes=len(self.class_names))
        check_split(self.eval, "eval", num_classes=len(self.class_names))
        if shape_of(self.eval) != self.image_shape:
            raise ValueError(
                f"images must have one shape: train has {self.image_shape} and eval"
                f" {shape_of(self.eval)}"
            )


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
    try:
        datasets.check()
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


def num_samples(split: Split) -> int:
    """Return the number of samples of a split."""
    return len(split)  # type: ignore[arg-type]  # map-style data sets have a length


def in_whole(split: Any, index: int = 0) -> tuple[Any, int]:
    """Return the data set behind a `Subset`, and the sample's index in it."""
    while type(split) is Subset:
        index = split.indices[index]
        split = split.dataset
    return split, index


def member(split: Split, name: str) -> Any:
    """Return an optional member of the data set of `split`, see `Split`; None if it has none."""
    return getattr(in_whole(split)[0], name, None)


def per_sample(split: Split, name: str) -> Tensor | None:
    """Return the attribute `name` ("labels" or "groups") of a split, [N]; None without a tensor."""
    if type(split) is Subset:
        values = per_sample(split.dataset, name)
        return None if values is None else values[list(split.indices)]
    values = getattr(split, name, None)
    return values if isinstance(values, Tensor) else None


def class_counts(split: Split, num_classes: int) -> Tensor | None:
    """Return the number of samples of each class, int64 [num_classes]; None if it is unknown."""
    labels = per_sample(split, "labels")
    return None if labels is None else torch.bincount(labels.cpu(), minlength=num_classes)


def shape_of(split: Split) -> Shape:
    """Return the attribute ``image_shape`` of a split, or the shape of its first image."""
    shape = member(split, "image_shape")
    if shape is None:
        is_resident = isinstance(split, ImageTensors)
        shape = split.images.shape[1:] if is_resident else read_sample(split, 0)[0].shape
    channels, height, width = shape
    return channels, height, width


def sample_name(split: Split, index: int) -> str:
    """Return the path of a sample's file, or else its number in the whole data set."""
    if isinstance(split, ImageTensors):
        return f"sample {index}"
    dataset, index = in_whole(split, index)
    path = getattr(dataset, "path", None)
    return str(path(index)) if callable(path) else f"sample {index} of {type(dataset).__name__}"


def to_tensor(image: Any) -> Tensor:
    """Return a copy of the pixels of a PIL image or an array: [H, W] or [H, W, C] -> [C, H, W]."""
    if getattr(image, "mode", None) == "P":  # pixels are numbers of a palette's colors
        image = image.convert("RGB")
    pixels = torch.from_numpy(np.array(image))
    if pixels.ndim == 2:
        return pixels[None]
    return pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels


def read_sample(
    split: Dataset[Any], index: int, draws: Sequence[float] | None = None
) -> tuple[Tensor, int]:
    """Return the image, uint8 [C, H, W], and the label of a sample.

    draws: four numbers in [0, 1) that choose the crop, for a data set with ``read``; None: the
    center crop.

    Raises:
        BadSampleError: the data set raised BadImageError.
        RuntimeError: the data set raised another error.
        MemoryError: the memory of the host is used up.
        ValueError: the image is not uint8 or does not have three dimensions.
    """
    dataset, index = in_whole(split, index)
    read = getattr(dataset, "read", None)
    try:
        sample: Any = read(index, draws) if callable(read) else dataset[index]
        image, label = sample
        image = image if isinstance(image, Tensor) else to_tensor(image)
        label = int(label)
    except MemoryError:
        raise
    except BadImageError as error:
        raise BadSampleError(f"{sample_name(dataset, index)} cannot be read: {error}") from error
    except Exception as error:  # a data set's code may raise anything
        raise RuntimeError(
            f"{sample_name(dataset, index)} cannot be read: {type(error).__name__}: {error}"
        ) from error

    if image.dtype != torch.uint8 or image.ndim != 3:
        raise ValueError(
            f"{sample_name(dataset, index)} must be a uint8 tensor [C, H, W] or a PIL image and is"
            f" {image.dtype} {list(image.shape)}: leave scaling and normalization to data.mean and"
            " data.std"
        )
    return image, label


def fingerprint_parts(split: Split) -> Iterator[bytes | memoryview]:
    """Yield bytes that identify the samples of a split."""
    if type(split) is Subset:
        yield np.array(split.indices).tobytes()
        yield from fingerprint_parts(split.dataset)
    elif isinstance(split, ImageTensors):
        yield repr(tuple(split.images.shape)).encode()
        yield split.images.contiguous().numpy().data
        yield split.labels.contiguous().numpy().data
    elif callable(own := getattr(split, "fingerprint", None)):
        yield str(own()).encode()
    else:
        count = num_samples(split)
        yield str(count).encode()
        for index in sorted({0, count // 2, count - 1}):
            image, label = read_sample(split, index)
            yield image.contiguous().numpy().tobytes() + str(label).encode()


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
