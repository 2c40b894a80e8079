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

KINDS = {1: "labels", 3: "images"}


def read_split(folder: Path, prefix: str, *, num_classes: int) -> ImageTensors:
    """Return ``<prefix>-images-idx3-ubyte[.gz]`` of `folder` with its labels.

    Raises:
        ConfigError: a file is missing or damaged, or the two do not belong together.
    """
    paths = []
    for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
        path = find_idx(folder, name)
        if path is None:
            raise ConfigError(f"{name}[.gz] is missing in {folder}")
        paths.append(path)
    images, labels = read_idx(paths[0], dimensions=3), read_idx(paths[1], dimensions=1)
    require(
        len(images) == len(labels),
        f"{paths[0]} has {len(images):,} images and {paths[1].name} {len(labels):,} labels: they must be as many",
    )
    highest = int(labels.max())
    require(highest < num_classes, f"{paths[1]} has the label {highest}: it must be less than {num_classes}")
    return ImageTensors(images[:, None], labels.long())


def read_idx(path: Path, *, dimensions: int) -> Tensor:
    """Return the uint8 array in the IDX file `path`, gzipped or not: 3 dimensions are images, 1 is labels.

    Source: the format's description at the end of LeCun, Cortes and Burges's MNIST page.

    Raises:
        ConfigError: the file is truncated, is no IDX file or holds another kind of array.
    """
    data = _read_bytes(path)
    start = data[:4]
    if start[:3] != b"\x00\x00\x08" or start[3:] not in (b"\x01", b"\x03"):
        raise ConfigError(f"{path} is not an IDX file of bytes: it begins with {start.hex(' ') or 'nothing'}")
    if start[3] != dimensions:
        raise ConfigError(f"{path} has {KINDS[start[3]]} and must have {KINDS[dimensions]}: are two files swapped?")
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, header, 4)]
    expected = header + math.prod(shape)
    if len(data) != expected:
        problem = "truncated" if len(data) < expected else "too long"
        raise ConfigError(f"{path} is {problem}: it has {len(data):,} bytes and its header says {expected:,}")
    if expected == header:
        raise ConfigError(f"{path} is empty: its header says {' × '.join(map(str, shape))} {KINDS[dimensions]}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header).view(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except EOFError as error:
        raise ConfigError(f"{path} is truncated: the compressed data stops before its end") from error
    except (OSError, zlib.error) as error:  # a gzip checksum that does not match is an OSError too
        raise ConfigError(f"{path} cannot be read: {error}") from error


def find_idx(folder: Path, name: str) -> Path | None:
    """Return `name` or `name`.gz in `folder`, or None if neither is there."""
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if os.path.isfile(path)), None)  # Path.is_file raises where access is denied
