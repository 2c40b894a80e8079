"""Fashion-MNIST: from a folder, from Debian's package, or downloaded once per node."""

import fcntl
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import torch

from ddp_trainer.config.data import FashionMnistConfig
from ddp_trainer.config.errors import ConfigError, TransientError, require
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.data.datasets.idx import find_idx, read_split

logger = logging.getLogger(__name__)

NETWORK_SECONDS = 30.0
LOCK_SECONDS = 600.0
"""How long a rank waits for another one that downloads."""
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FILES = tuple(f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
CLASS_NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def build_fashion_mnist(config: FashionMnistConfig) -> Datasets:
    """Return 60,000 training and 10,000 evaluation images of 28×28 pixels, or those in data.root.

    Source: Xiao, Rasul and Vollgraf, Fashion-MNIST, 2017 (arXiv 1708.07747).

    Raises:
        ConfigError: the data is not there, or a file is not valid.
    """
    folder = locate(config.root)
    try:
        train, evaluation = (read_split(folder, prefix, num_classes=10) for prefix in ("train", "t10k"))
        sizes = [" × ".join(map(str, part.images.shape[2:])) for part in (train, evaluation)]
        require(sizes[0] == sizes[1], f"training images have {sizes[0]} pixels and test images {sizes[1]}")
    except ConfigError as error:
        fix = "put the right files there" if config.root else "remove the folder, or set data.root to another"
        raise ConfigError(f"data.root={config.root or 'null'}: {error}; {fix}") from error
    return Datasets(train=train, eval=evaluation, class_names=CLASS_NAMES)


def locate(data_root: str | None) -> Path:
    """Return the folder that holds the four files, downloading them once per node if no folder has them.

    Raises:
        ConfigError: data.root does not have all of them, or no folder has and the download failed.
    """
    if data_root is not None:
        root = expand_user(data_root)
        missing = [name for name in FILES if find_idx(root, name) is None]
        require(
            not missing,
            f"data.root={data_root} must be a folder with Fashion-MNIST's four IDX files, gzipped or not: "
            f"it {'lacks ' + ', '.join(missing) if root.is_dir() else 'is not a folder'}",
        )
        return root
    cache = Path(torch.hub.get_dir()).parent / "fashion_mnist"
    for folder in (DEBIAN_FOLDER, cache):
        if all(find_idx(folder, name) for name in FILES):
            return folder
    try:
        return download(cache)
    except (OSError, RuntimeError, HTTPException) as error:  # torchvision raises each of them
        if isinstance(error, TransientError):
            raise
        raise ConfigError(
            "data=fashion_mnist is missing and the download failed. Three ways: set data.root to a folder with the "
            f"four IDX files; install Debian's dataset-fashion-mnist, which puts them into {DEBIAN_FOLDER}; "
            f"or see why the download into {cache} failed: {' '.join(str(error).split())}"
        ) from error


def expand_user(path: str) -> Path:
    """Return `path` with ``~`` replaced.

    Raises:
        ConfigError: it names a user who does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"data.root={path} names a home directory that does not exist: give the whole path"
        ) from error


def download(folder: Path) -> Path:
    """Download into `folder` under a lock; it appears complete and verified, or not at all."""
    from torchvision.datasets import FashionMNIST  # takes a second to import, and is rarely needed

    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        wait_for_lock(lock.fileno(), folder)
        if folder.is_dir():  # downloaded by another rank of this node meanwhile
            return folder
        with (
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch,
            socket_timeout(NETWORK_SECONDS),
        ):
            FashionMNIST(scratch, download=True)  # checks each file's MD5
            raw = Path(scratch) / "FashionMNIST" / "raw"
            for archive in raw.glob("*.gz"):
                archive.unlink()  # extracted beside it
            os.rename(raw, folder)
    return folder


def wait_for_lock(descriptor: int, folder: Path) -> None:
    """Return once this process holds the lock.

    Raises:
        TransientError: another process has held it for `LOCK_SECONDS`.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    is_announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{folder} has been downloaded by another process for {LOCK_SECONDS:.0f} s: is it still alive?"
                ) from None
            if not is_announced:
                logger.info("waiting for another process that downloads %s", folder)
                is_announced = True
            time.sleep(0.2)


@contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """Give every socket a timeout inside the context, because torchvision would wait without limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
