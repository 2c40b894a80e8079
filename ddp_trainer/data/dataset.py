"""Data sets: their splits, how a sample is read from a split, and a fingerprint of the samples."""

import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ddp_trainer.config.errors import TransientError


@dataclass(slots=True)
class ImageTensors:
    """A split in memory: images, uint8 [N, C, H, W] in 0 … 255, and labels, int64 [N].

    Each rank copies both tensors to its device, see `ResidentReader`.
    """

    images: Tensor
    labels: Tensor
    center_crop: "float | str | None" = None
    """As the member of a map-style data set, see `Split`."""
    places: Tensor | None = None
    """The index of each sample in the whole split of which this is a part; None: it is whole."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def image_shape(self) -> torch.Size:
        """Channels, height and width of the images."""
        return self.images.shape[1:]


Shape = tuple[int, int, int]
"""Channels, height and width of an image."""
Split = ImageTensors | Dataset[Any]
"""A split: images in memory, or a map-style data set, whose samples are streamed: read as needed.

A sample of a map-style data set is a pair: the image, which is a uint8 tensor [C, H, W] or a PIL
image, and the label, which is an int.

A map-style data set may also have these members:

- ``read(index, draws)`` returns the sample, like indexing, but with a crop: `draws` are four
  numbers in [0, 1) that choose a random crop, or None for the center crop;
- ``labels``, a tensor int64 [N]: a validation split then has the same share of each class;
- ``weights``, a tensor [N]: how often a sample is drawn with data.sampling=weights, relative to
  the others;
- ``groups``, a tensor [N]: samples of one group, for example of one patient, are then either all in
  the validation split or all in the training split;
- ``path(index)`` returns the path of a sample's file, for messages;
- ``image_shape``: channels, height and width of all images; by default, those of the first image;
- ``fingerprint()`` returns a text that identifies the samples;
- ``center_crop``: how a picture of another size becomes an image: the side of the center crop,
  divided by the side of the largest crop that has the aspect ratio of the images; or "stretch" if
  the whole picture is scaled. Without this member, predictions refuse such pictures.
"""


class BadImageError(Exception):
    """A sample cannot be read; the message says why, and data.on_bad_image=skip leaves it out."""


@dataclass
class Datasets:
    """The training split, the split to evaluate on, and the names of the classes."""

    train: Split
    eval: Split
    class_names: Sequence[str]
    eval_split: str = "test"
    """The name of the split to evaluate on: "validation" or "test"."""

    @cached_property
    def image_shape(self) -> Shape:
        """Channels, height and width of the first training image."""
        return shape_of(self.train)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256, in hex digits, of the class names and of both splits.

        Of a split in memory, all bytes count. Of a streamed split, the result of its method
        ``fingerprint`` counts, or, without this method, its length and three samples.
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
    """Return the data set inside of all `Subset` wrappers, and the sample's index in it."""
    while type(split) is Subset:
        index = split.indices[index]
        split = split.dataset
    return split, index


def member(split: Split, name: str) -> Any:
    """Return the optional member `name` (see `Split`) of the data set of `split`, or None."""
    return getattr(in_whole(split)[0], name, None)


def per_sample(split: Split, name: str) -> Tensor | None:
    """Return the tensor `name`, for example "labels", of `split`, [N]; None if it has none."""
    if type(split) is Subset:
        values = per_sample(split.dataset, name)
        return None if values is None else values[list(split.indices)]
    values = getattr(split, name, None)
    return values if isinstance(values, Tensor) else None


def shape_of(split: Split) -> Shape:
    """Return the attribute ``image_shape`` of a split, or the shape of its first image."""
    shape = member(split, "image_shape")
    channels, height, width = read_sample(split, 0)[0].shape if shape is None else shape
    return channels, height, width


def sample_name(split: Split, index: int) -> str:
    """Return a sample's name for messages: the path of its file, or its index in the data set."""
    if isinstance(split, ImageTensors):
        return f"sample {index if split.places is None else int(split.places[index])}"
    dataset, index = in_whole(split, index)
    path = getattr(dataset, "path", None)
    return str(path(index)) if callable(path) else f"sample {index} of {type(dataset).__name__}"


def to_tensor(image: Any) -> Tensor:
    """Return a copy of the pixels of a PIL image or an array: [H, W] or [H, W, C] -> [C, H, W]."""
    if getattr(image, "mode", None) == "P":  # the pixels are indices into a palette of colors
        image = image.convert("RGB")
    pixels = torch.from_numpy(np.array(image))
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return pixels.movedim(-1, 0)


def read_sample(
    split: Split, index: int, draws: Sequence[float] | None = None
) -> tuple[Tensor, int]:
    """Return the image, uint8 [C, H, W], and the label of a sample.

    draws: four numbers in [0, 1) that choose the crop, for a data set with ``read``; None: the
    center crop.

    Raises:
        RuntimeError: the data set raised another error, for example BadImageError, which is the
            ``__cause__`` of this error.
        MemoryError: the host has no memory left.
        TransientError: the sample cannot be read now, but may be later.
        ValueError: the image is not uint8 or does not have three dimensions.
    """
    dataset, index = in_whole(split, index)
    read = getattr(dataset, "read", None)
    try:
        sample: Any = read(index, draws) if callable(read) else dataset[index]
        image, label = sample
        image = image if isinstance(image, Tensor) else to_tensor(image)
        label = operator.index(label)  # not int(), which would round a float down
    except (MemoryError, TransientError):
        raise
    except (Exception, SystemExit) as error:  # a data set's code may raise anything
        raise RuntimeError(
            f"{sample_name(dataset, index)} cannot be read: {type(error).__name__}: {error}"
        ) from error

    if image.dtype != torch.uint8 or image.ndim != 3:
        raise ValueError(
            f"{sample_name(dataset, index)} must be a uint8 tensor [C, H, W] or a PIL image and is"
            f" {image.dtype} {list(image.shape)}: return pixels from 0 to 255 with a channel"
            " dimension; data.mean and data.std scale and normalize them"
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
