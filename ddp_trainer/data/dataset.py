"""Data sets: the object that a builder returns, the held-out validation split, the fingerprint of
the samples.
"""

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
from ddp_trainer.data.images.decoding import BadImageError
from ddp_trainer.data.images.image_files import ImageFiles
from ddp_trainer.distributed.seeding import generator


@dataclass(slots=True)
class ImageTensors:
    """A split that is kept in memory: images, uint8 [N, C, H, W] in 0 … 255, and labels, int64 [N].

    A run copies both to its device (`ResidentReader`).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


Shape = tuple[int, int, int]
"""Channels, height and width of an image."""
Split = ImageTensors | Dataset[Any]
"""Images in memory, or a map-style data set of (uint8 [C, H, W] tensor or PIL image, int), which is
streamed.
"""


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
        """A digest of the samples: all bytes of a split in memory, the length and some samples of a
        streamed split.

        A map-style data set may have its own method ``fingerprint() -> str``, which is used
        instead.
        """
        digest = hashlib.sha256(repr(list(self.class_names)).encode())
        for split in (self.train, self.eval):
            for part in fingerprint_parts(split):
                digest.update(part)
        return digest.hexdigest()

    def check(self) -> None:
        """Check that no split is empty, that tensors in memory are valid, and that the images have
        one shape.

        The shape of a map-style data set is that of its first image, which is read; of image files,
        none is read.

        Raises:
            ValueError: a check fails. RuntimeError: the first image cannot be read.
        """
        for name, split in (("train", self.train), ("eval", self.eval)):
            if not isinstance(split, Sized):
                raise ValueError(
                    f"{name} has no length: it must be ImageTensors or a map-style data set"
                )
            if len(split) == 0:
                raise ValueError(f"{name} has no sample")
            if isinstance(split, ImageTensors):
                check_tensors(split, name, num_classes=len(self.class_names))
        if shape_of(self.eval) != self.image_shape:
            raise ValueError(
                f"images must have one shape: train has {self.image_shape} and eval"
                f" {shape_of(self.eval)}"
            )


def build_datasets(config: DataConfig) -> Datasets:
    """Return the data set that `config` chooses; a validation split, if `config` asks for it,
    replaces the test split.

    Raises ConfigError if a file is missing or damaged, or the images do not fit the config.
    """
    try:
        datasets = registry.build("data", config, returns=Datasets)
        try:
            datasets.check()
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"data={config.name}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"data={config.name} does not fit into the memory of this host: use a larger host"
        ) from error
    if config.validation_fraction:
        datasets = hold_out(datasets, config.validation_fraction)
    channels, height, width = datasets.image_shape
    require(
        len(config.mean) in (1, channels),
        f"data.mean={config.mean} and data.std must each have one value per channel, or one value"
        f" for all: the number of channels of data={config.name} is {channels}",
    )
    config.augment.check_images(channels, height, width)
    return datasets


def check_tensors(split: ImageTensors, name: str, *, num_classes: int) -> None:
    """Check dtype and shape of images and labels, and that labels are below `num_classes`;
    ValueError if not.
    """
    images = split.images
    labels = split.labels
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(
            f"{name} images must be uint8 [N, C, H, W] and are {images.dtype} {list(images.shape)}"
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{name} labels must be int64 [{len(images)}] and are {labels.dtype}"
            f" {list(labels.shape)}"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"{name} labels must be 0 to {num_classes - 1} and are {labels.min()} to {labels.max()}"
        )


def num_samples(split: Split) -> int:
    """Return the number of samples of a split."""
    return len(split)  # type: ignore[arg-type]  # map-style data sets have a length


def shape_of(split: Split) -> Shape:
    """Return the shape of the first image of a split."""
    if isinstance(whole := in_whole(split, 0)[0], ImageFiles):
        return whole.image_shape
    channels, height, width = (
        split.images[0] if isinstance(split, ImageTensors) else read_sample(split, 0)[0]
    ).shape
    return channels, height, width


class BadSampleError(RuntimeError):
    """The data set raised BadImageError for a sample (a bad image); ``__cause__`` is that error,
    with the reason.
    """


def read_sample(
    dataset: Dataset[Any], index: int, draws: Sequence[float] | None = None
) -> tuple[Tensor, int]:
    """Return the image, uint8 [C, H, W], and the label of a sample.

    draws: four numbers in [0, 1) that choose the crop of an image file; None: a center crop.

    Raises:
        BadSampleError: the data set raised BadImageError. RuntimeError: the data set raised another
        error.
        MemoryError: the memory of the host is used up.
        ValueError: the image is not uint8 or does not have three dimensions.
    """
    dataset, index = in_whole(dataset, index)
    try:
        image, label = (
            dataset.read(index, draws) if isinstance(dataset, ImageFiles) else dataset[index]
        )
        if not isinstance(image, Tensor):  # a PIL image: [H, W] or [H, W, C]
            # P: numbers of a palette
            image = image.convert("RGB") if getattr(image, "mode", None) == "P" else image
            image = torch.from_numpy(np.array(image))
            image = image[None] if image.ndim == 2 else image.permute(2, 0, 1)
        label = int(label)
    except BadImageError as error:
        raise BadSampleError(f"{sample_name(dataset, index)} cannot be read: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # a data set's code may raise anything
        raise RuntimeError(
            f"{sample_name(dataset, index)} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if image.dtype != torch.uint8 or image.ndim != 3:
        name = sample_name(dataset, index)
        shape = list(image.shape)
        raise ValueError(
            f"{name} must be a uint8 tensor [C, H, W] or a PIL image and is {image.dtype} {shape}: "
            "leave scaling and normalization to data.mean and data.std"
        )
    return image, label


def sample_name(split: Split, index: int) -> str:
    """Return a sample's name: its file's path, else its number; for a `Subset`, its number in the
    whole data set.
    """
    if isinstance(split, ImageTensors):
        return f"sample {index}"
    dataset, index = in_whole(split, index)
    path = getattr(dataset, "path", None)
    return str(path(index)) if callable(path) else f"sample {index} of {type(dataset).__name__}"


def in_whole(split: Any, index: int) -> tuple[Any, int]:
    """Return the data set behind a `Subset` and the sample's index in it; for any other split,
    `split` and `index`.
    """
    return (split.dataset, split.indices[index]) if type(split) is Subset else (split, index)


def fingerprint_parts(split: Split) -> Iterator[bytes | memoryview]:
    """Yield bytes that identify the samples of a split."""
    if type(split) is Subset:
        yield np.array(split.indices).tobytes()
        split = split.dataset
    if isinstance(split, ImageTensors):
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
    """Return `Datasets` whose evaluation split is a random part of the training split, the same
    part for every seed.

    For image files, the part has the same share of each class, to within one image, and never a
    whole class.
    """
    order = torch.randperm(
        num_samples(datasets.train), generator=generator(0, purpose="validation")
    )
    groups = [order]
    if isinstance(datasets.train, ImageFiles):
        labels = datasets.train.labels[order]
        groups = [order[labels == label] for label in labels.unique()]
    parts = list[Sequence[Tensor]]()
    total = 0
    held = 0
    for group in groups:  # take `fraction` of each group, rounded so that the total is right
        size = len(group)
        total = total + len(group)
        missing = round(fraction * total) - held
        count = max(math.floor(fraction * size), min(missing, math.ceil(fraction * size), size - 1))
        parts.append(group.tensor_split([count]))
        held += count
    require(
        held > 0,
        f"data.validation_fraction={fraction} of {len(order)} training images holds out no image:"
        " raise data.validation_fraction, or, if every class has a single image, add images",
    )

    def select(ids: Tensor) -> Split:
        if isinstance(split := datasets.train, ImageTensors):
            return ImageTensors(split.images[ids], split.labels[ids])
        return Subset(split, ids.tolist())

    held_out, train = (select(torch.cat(ids).sort().values) for ids in zip(*parts, strict=True))
    return Datasets(train=train, eval=held_out, class_names=datasets.class_names)
