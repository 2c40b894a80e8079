"""Data sets: their splits, the samples of a split, and the fingerprint."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset


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
