"""IDX, the file format of MNIST and its relatives."""

import gzip
import math
import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.dataset import ImageTensors

KINDS = {3: "images", 1: "labels"}
"""The content of a file by its number of dimensions."""


def read_split(folder: Path, prefix: str) -> ImageTensors:
    """Return the split of the IDX files ``<prefix>-…``; ConfigError if one is damaged."""
    images, labels = (
        read_idx(find_idx(folder, f"{prefix}-{kind}-idx{dimensions}-ubyte"), dimensions=dimensions)
        for dimensions, kind in KINDS.items()
    )
    return ImageTensors(images[:, None], labels.long())


def find_idx(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder` if that file exists, else the path of `name`.gz."""
    path = folder / name
    # Path.is_file raises where access is denied
    return path if os.path.isfile(path) else folder / f"{name}.gz"


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """Return the uint8 array of an IDX file, gzipped or not, with `dimensions`: see `KINDS`.

    Raises ConfigError for a file that cannot be read, is truncated, or has other content.

    Source: the format's description at the end of LeCun, Cortes and Burges's MNIST page.
    """
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (
        OSError,
        EOFError,
        zlib.error,
    ) as error:  # a gzip checksum that does not match is an OSError
        raise ConfigError(f"{path} cannot be read: {error}") from error
    header = 4 + 4 * dimensions
    require(
        data[:4] == bytes([0, 0, 8, dimensions]) and len(data) >= header,
        f"{path} is not an IDX file of {KINDS[dimensions]}: it begins with"
        f" {data[:4].hex(' ') or 'nothing'}; are images and labels swapped?",
    )
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, header, 4)]
    size = header + math.prod(shape)
    require(
        len(data) == size,
        f"{path} is damaged: it has {len(data):,} bytes and its header says {size:,}",
    )
    require(
        size > header,
        f"{path} is empty: its header says {' × '.join(map(str, shape))} {KINDS[dimensions]}",
    )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header).view(shape)
