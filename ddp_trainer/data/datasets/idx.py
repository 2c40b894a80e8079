"""IDX, the file format of MNIST and its relatives."""

import gzip
import math
import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, path_error, require
from ddp_trainer.data.dataset import ImageTensors

KINDS = {3: "images", 1: "labels"}
"""What an IDX file holds, by the number of dimensions of its array."""


def read_split(folder: Path, prefix: str) -> ImageTensors:
    """Return the split in the files ``<prefix>-…``; ConfigError if one is missing or damaged."""
    images, labels = (
        read_idx(find_idx(folder, f"{prefix}-{kind}-idx{dimensions}-ubyte"), dimensions=dimensions)
        for dimensions, kind in KINDS.items()
    )
    return ImageTensors(images[:, None], labels.long(), center_crop=1)


def find_idx(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder` if that file exists, else the path of `name`.gz."""
    path = folder / name
    return path if os.path.isfile(path) else folder / f"{name}.gz"


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """Return the array in an IDX file, gzipped or not: a uint8 tensor with `dimensions` dimensions.

    Raises ConfigError or TransientError (see `path_error`) if the file cannot be read, ConfigError
    if it is truncated or has other content (see `KINDS`).

    Source: the format's description at the end of LeCun, Cortes and Burges's MNIST page.
    """
    require(os.path.isfile(path) or not os.path.exists(path), f"{path} is not a regular file")
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{path} cannot be read ({reason})"
        # gzip raises an OSError without a number for a wrong checksum
        if isinstance(error, OSError) and error.errno is not None:
            raise path_error(error, message) from error
        raise ConfigError(message) from error
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
        f"{path} is damaged: it has {len(data):,} bytes and its header says {size:,}"
        " (both uncompressed): replace it with an intact copy",
    )
    require(
        size > header,
        f"{path} is empty: its header says {' × '.join(map(str, shape))} {KINDS[dimensions]};"
        " replace it with an intact copy",
    )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header).view(shape)
