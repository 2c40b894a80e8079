"""Fashion-MNIST: from a folder, from Debian's package, or downloaded once per node."""

import os
import socket
import tempfile
from http.client import HTTPException
from pathlib import Path

import torch

from ddp_trainer.config.data import FashionMnistConfig
from ddp_trainer.config.errors import ConfigError, TransientError, one_line
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.data.datasets.idx import KINDS, find_idx, read_split
from ddp_trainer.files import lock_file

NETWORK_SECONDS = 30.0
LOCK_SECONDS = 600.0
"""How long a rank waits for another rank that downloads."""
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FILES = tuple(
    f"{split}-{kind}-idx{number}-ubyte"
    for split in ("train", "t10k")
    for number, kind in KINDS.items()
)
CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def build_fashion_mnist(config: FashionMnistConfig) -> Datasets:
    """Return Fashion-MNIST: 60,000 training and 10,000 evaluation images of 28×28 pixels.

    Raises:
        ConfigError: an IDX file is missing or not valid, or the download failed.
        TransientError: another process takes too long to download the files.

    Source: Xiao, Rasul and Vollgraf, Fashion-MNIST, 2017 (arXiv 1708.07747).
    """
    folder = locate(config.root)
    try:
        train = read_split(folder, "train")
        evaluation = read_split(folder, "t10k")
    except ConfigError as error:
        raise ConfigError(
            f"data.root={config.root or 'null'}: {error}; put the four IDX files of Fashion-MNIST"
            " there, gzipped or not, or set data.root to another folder"
        ) from error
    return Datasets(train=train, eval=evaluation, class_names=CLASS_NAMES)


def locate(data_root: str | None) -> Path:
    """Return the folder with the four IDX files of Fashion-MNIST.

    With `data_root`, this is the folder, without a check of its files. Without it, the folder is
    that of Debian's package dataset-fashion-mnist, or else of a download. Raises ConfigError if the
    download fails.
    """
    if data_root is not None:
        return Path(os.path.expanduser(data_root))
    cache = Path(torch.hub.get_dir()).parent / "fashion_mnist"
    for folder in (DEBIAN_FOLDER, cache):
        if all(os.path.isfile(find_idx(folder, name)) for name in FILES):
            return folder
    try:
        download(cache)
    except (OSError, RuntimeError, HTTPException) as error:  # torchvision raises all three types
        if isinstance(error, TransientError):
            raise
        raise ConfigError(
            f"the files of data=fashion_mnist are missing and the download into {cache} failed"
            f" ({one_line(error)}): set data.root to a folder with the four IDX files,"
            " install Debian's dataset-fashion-mnist, or make the download possible"
        ) from error
    return cache


def download(folder: Path) -> None:
    """Download the files into the new `folder`; do nothing if another process has done this."""
    # here, because torchvision takes a second to import and is rarely needed
    from torchvision.datasets import FashionMNIST

    folder.parent.mkdir(parents=True, exist_ok=True)
    holder = f"another process has been downloading {folder} for 10 min: end it if it hangs"
    with lock_file(folder.parent / f"{folder.name}.lock", seconds=LOCK_SECONDS, holder=holder):
        if folder.is_dir():
            return
        limit = socket.getdefaulttimeout()
        socket.setdefaulttimeout(NETWORK_SECONDS)  # because torchvision sets no timeout
        try:
            with tempfile.TemporaryDirectory(
                dir=folder.parent, prefix=f".{folder.name}-"
            ) as scratch:
                FashionMNIST(scratch, download=True)  # checks each file's MD5
                raw = Path(scratch) / "FashionMNIST" / "raw"
                for archive in raw.glob("*.gz"):
                    archive.unlink()  # because torchvision has extracted the file beside it
                os.rename(raw, folder)
        finally:
            socket.setdefaulttimeout(limit)
