"""What the images are: whole data sets as uint8 tensors in memory."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from ddp_trainer.config import (
    ConfigError,
    DataConfig,
    DigitsConfig,
    FashionMnistConfig,
    SyntheticConfig,
    check_crop,
    require,
)
from ddp_trainer.data.idx import find_idx, read_idx
from ddp_trainer.seeding import generator

NETWORK_SECONDS = 30.0
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@dataclass(slots=True)
class ImageSet:
    """images: uint8 [N, C, H, W] in 0 … 255, labels: int64 [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(slots=True)
class Splits:
    """A data set: what is trained on, what is measured on, and how many classes there are."""

    train: ImageSet
    eval: ImageSet
    num_classes: int


def prepare(config: DataConfig) -> None:
    """See that the data is on this node, downloading it where it may be; every rank may call this at once.

    Raises:
        ConfigError: the data is not here and cannot be had.
    """
    if isinstance(config, FashionMnistConfig):
        locate_fashion_mnist(config)


def load_splits(config: DataConfig, *, seed: int = 0) -> Splits:
    """Read the data set that `config` names. `seed` matters to synthetic images only.

    Raises:
        ConfigError: a file is missing or is not what it should be.
    """
    match config:
        case DigitsConfig():
            splits = load_digits()
        case FashionMnistConfig():
            splits = load_fashion_mnist(config)
        case SyntheticConfig():
            splits = make_synthetic(config, seed=seed)
        case DataConfig():
            raise ConfigError(f"data.name={config.name!r} is unknown: choose digits, fashion_mnist or synthetic")
        case _:
            assert_never(config)
    if config.validation_fraction:
        splits = hold_out(splits, config.validation_fraction)
    _, channels, height, width = splits.train.images.shape
    require(
        len(config.mean) == channels,
        f"data.mean={config.mean} must have one value per channel, and so must data.std: "
        f"the images of data={config.name} have {channels}",
    )
    check_crop(config.augment, height=height, width=width)
    return splits


def hold_out(splits: Splits, fraction: float) -> Splits:
    """Return `splits` with a random part of the training images to evaluate on, the same part whatever the seed.

    Raises:
        ConfigError: one of the parts would be empty.
    """
    order = torch.randperm(len(splits.train), generator=generator(0, purpose="validation"))
    count = round(fraction * len(order))
    require(
        0 < count < len(order),
        f"data.validation_fraction={fraction} of {len(order)} training images leaves one part without any",
    )
    parts = order[count:].sort().values, order[:count].sort().values
    train, held_out = (ImageSet(splits.train.images[ids], splits.train.labels[ids]) for ids in parts)
    return Splits(train=train, eval=held_out, num_classes=splits.num_classes)


# --- IDX files ----------------------------------------------------------------------------------


def read_split(folder: Path, prefix: str, *, num_classes: int) -> ImageSet:
    """Return ``<prefix>-images-idx3-ubyte[.gz]`` of `folder` with its labels.

    Raises:
        ConfigError: a file is missing or damaged, or the two do not belong together.
    """
    paths = []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        path = find_idx(folder, name)
        if path is None:
            raise ConfigError(f"{name}[.gz] is not in {folder}")
        paths.append(path)
    images, labels = read_idx(paths[0], dimensions=3), read_idx(paths[1], dimensions=1)
    require(
        len(images) == len(labels),
        f"{paths[0]} has {len(images):,} images and {paths[1].name} {len(labels):,} labels: they are of two data sets",
    )
    highest = int(labels.max())
    require(highest < num_classes, f"{paths[1]} has the label {highest}: the {num_classes} classes count from 0")
    return ImageSet(images[:, None], labels.long())


# --- digits -------------------------------------------------------------------------------------


def load_digits() -> Splits:
    """Return 1,797 handwritten digits of 8×8 pixels; of each class every fifth is for evaluation.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998, doi 10.24432/C50P49, CC BY 4.0 (the part scikit-learn ships).
    """
    digits = read_split(Path(str(files("ddp_trainer.data"))), "digits", num_classes=10)
    images = digits.images * 15  # 0 … 16 as stored, 0 … 240 as pixels
    nth_of_class = torch.zeros_like(digits.labels)
    for label in range(10):
        mine = digits.labels == label
        nth_of_class[mine] = torch.arange(int(mine.sum()))
    held_out = nth_of_class % 5 == 4
    return Splits(
        train=ImageSet(images[~held_out], digits.labels[~held_out]),
        eval=ImageSet(images[held_out], digits.labels[held_out]),
        num_classes=10,
    )


# --- Fashion-MNIST ------------------------------------------------------------------------------


FASHION_MNIST_FILES = tuple(
    f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


def load_fashion_mnist(config: FashionMnistConfig) -> Splits:
    """Return 60,000 training and 10,000 evaluation images of 28×28 pixels, or what else is in data.root.

    Source: Xiao, Rasul and Vollgraf, Fashion-MNIST, 2017 (arXiv 1708.07747).

    Raises:
        ConfigError: the data is not there, or a file is not what it should be.
    """
    folder = locate_fashion_mnist(config)
    try:
        train, evaluation = (read_split(folder, prefix, num_classes=10) for prefix in ("train", "t10k"))
        sizes = [" × ".join(map(str, part.images.shape[2:])) for part in (train, evaluation)]
        require(
            sizes[0] == sizes[1], f"{folder} has training images of {sizes[0]} pixels and test images of {sizes[1]}"
        )
    except ConfigError as error:
        way_out = "put the right files there" if config.root else "remove the folder, or set data.root to another"
        raise ConfigError(f"data.root={config.root or 'null'}: {error}; {way_out}") from error
    return Splits(train=train, eval=evaluation, num_classes=10)


def locate_fashion_mnist(config: FashionMnistConfig) -> Path:
    """Return the folder that holds the four files, downloading them once per node if nothing else has them.

    Raises:
        ConfigError: data.root has not all of them, or nothing else has and the download failed.
    """
    if config.root is not None:
        root = Path(config.root).expanduser()
        lacking = [name for name in FASHION_MNIST_FILES if find_idx(root, name) is None]
        require(
            not lacking,
            f"data.root={config.root} must be a folder with Fashion-MNIST's four IDX files, gzipped or not: "
            f"it {'lacks ' + ', '.join(lacking) if root.is_dir() else 'is not a folder'}",
        )
        return root
    cache = Path(torch.hub.get_dir()).parent / "fashion_mnist"
    for folder in (DEBIAN_FASHION_MNIST, cache):
        if all(find_idx(folder, name) for name in FASHION_MNIST_FILES):
            return folder
    try:
        return download_fashion_mnist(cache)
    except (OSError, RuntimeError, HTTPException) as error:  # torchvision raises each of them
        raise ConfigError(
            "data=fashion_mnist finds no images. Three ways: set data.root to a folder with the four IDX files; "
            f"install Debian's dataset-fashion-mnist, which puts them into {DEBIAN_FASHION_MNIST}; "
            f"or see why the download into {cache} failed: {' '.join(str(error).split())}"
        ) from error


def download_fashion_mnist(folder: Path) -> Path:
    """Download into `folder` under a lock; it appears whole, verified, or not at all."""
    from torchvision.datasets import FashionMNIST  # takes a second to import, and few need it

    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():  # another rank of this node was first
            return folder
        with (
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch,
            _network_timeout(NETWORK_SECONDS),
        ):
            FashionMNIST(scratch, download=True)  # checks each file's MD5
            raw = Path(scratch) / "FashionMNIST" / "raw"
            for archive in raw.glob("*.gz"):
                archive.unlink()  # extracted beside it
            os.rename(raw, folder)
    return folder


@contextmanager
def _network_timeout(seconds: float) -> Iterator[None]:
    """Let every socket give up after `seconds` of silence; torchvision would wait for good."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


# --- synthetic ----------------------------------------------------------------------------------


def make_synthetic(config: SyntheticConfig, *, seed: int) -> Splits:
    """Return noise around one random pattern per class: any shape, learnable, the same on every rank."""
    shape = (config.channels, config.height, config.width)
    patterns = torch.randint(
        256, (config.num_classes, *shape), dtype=torch.uint8, generator=generator(seed, purpose="patterns")
    )

    def split(count: int, purpose: str) -> ImageSet:
        random = generator(seed, purpose=purpose)
        labels = torch.randint(config.num_classes, (count,), generator=random)
        noise = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=random)
        return ImageSet(noise // 2 + patterns[labels] // 2, labels)

    return Splits(split(config.num_train, "train"), split(config.num_eval, "eval"), config.num_classes)
