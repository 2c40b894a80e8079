"""What the images are: whole data sets as uint8 tensors in memory."""

from __future__ import annotations

import fcntl
import gzip
import os
import tempfile
from dataclasses import dataclass
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
    require,
)
from ddp_trainer.seeding import generator

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
            splits = load_fashion_mnist(locate_fashion_mnist(config))
        case SyntheticConfig():
            splits = make_synthetic(config, seed=seed)
        case DataConfig():
            raise ConfigError(f"data.name={config.name!r} is unknown: choose digits, fashion_mnist or synthetic")
        case _:
            assert_never(config)
    channels = splits.train.images.shape[1]
    require(
        len(config.mean) == channels,
        f"data.mean={config.mean} has {len(config.mean)} values and the images have {channels} channels: "
        "give one per channel, and the same for data.std",
    )
    return splits


# --- IDX, the format of MNIST and its kin -------------------------------------------------------


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """Return the uint8 array in the IDX file `path`, gzipped or not: 3 dimensions are images, 1 is labels.

    Source: the format's description at the end of LeCun, Cortes and Burges's MNIST page.

    Raises:
        ConfigError: the file is truncated, is no IDX file or holds another kind of array.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ConfigError(f"{path} cannot be read ({error}): fetch the file again") from error
    kinds = {1: "labels", 3: "images"}
    if len(data) < 4 or data[:3] != b"\x00\x00\x08" or data[3] not in kinds:
        raise ConfigError(f"{path} is not an IDX file of bytes (it begins {data[:4].hex()}): fetch the file again")
    if data[3] != dimensions:
        raise ConfigError(f"{path} holds {kinds[data[3]]} where {kinds[dimensions]} belong: are two files swapped?")
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, header, 4)]
    expected = header + torch.Size(shape).numel()
    if len(data) < header or len(data) != expected:
        raise ConfigError(
            f"{path} is truncated or damaged: {len(data)} bytes where its header says {expected}, fetch the file again"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header).view(shape)


def read_split(folder: Path, prefix: str, *, num_classes: int) -> ImageSet:
    """Return ``<prefix>-images-idx3-ubyte[.gz]`` of `folder` with its labels."""
    paths = []
    for kind in ("images-idx3", "labels-idx1"):
        name = f"{prefix}-{kind}-ubyte"
        found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        require(bool(found), f"{folder} has no {name} (nor .gz): it needs the four IDX files")
        paths.append(found[0])
    images, labels = read_idx(paths[0], dimensions=3), read_idx(paths[1], dimensions=1)
    require(
        len(images) == len(labels),
        f"{paths[0]} has {len(images)} images and {paths[1]} {len(labels)} labels: they are not of one data set",
    )
    require(len(images) > 0, f"{paths[0]} has no images")
    highest = int(labels.max())
    require(highest < num_classes, f"{paths[1]} has label {highest}: there are {num_classes} classes, from 0")
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


def load_fashion_mnist(folder: Path) -> Splits:
    """Return 60,000 training and 10,000 evaluation images of 28×28 pixels.

    Source: Xiao, Rasul and Vollgraf, Fashion-MNIST, 2017 (arXiv 1708.07747).
    """
    return Splits(
        train=read_split(folder, "train", num_classes=10),
        eval=read_split(folder, "t10k", num_classes=10),
        num_classes=10,
    )


def locate_fashion_mnist(config: FashionMnistConfig) -> Path:
    """Return the folder that holds the four files, downloading them once per node if nothing else has them."""
    if config.root is not None:
        root = Path(config.root).expanduser()
        require(root.is_dir(), f"data.root={config.root} is not a folder: it should hold the four IDX files")
        return root
    cache = Path(torch.hub.get_dir()).parent / "fashion_mnist"
    for folder in (DEBIAN_FASHION_MNIST, cache):
        if folder.is_dir():
            return folder
    try:
        return download_fashion_mnist(cache)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"data.root is not set, {DEBIAN_FASHION_MNIST} (Debian's dataset-fashion-mnist) is not there, and the "
            f"download failed ({error}): set data.root to a folder with the four IDX files, "
            "or apt install dataset-fashion-mnist"
        ) from error


def download_fashion_mnist(folder: Path) -> Path:
    """Download into `folder` under a lock; it appears whole, verified, or not at all."""
    from torchvision.datasets import FashionMNIST  # takes a second to import, and few need it

    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():  # another rank of this node was first
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            FashionMNIST(scratch, download=True)  # checks each file's MD5
            raw = Path(scratch) / "FashionMNIST" / "raw"
            for archive in raw.glob("*.gz"):
                archive.unlink()  # extracted beside it
            os.rename(raw, folder)
    return folder


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
