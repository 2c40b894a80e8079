"""The data sets that tests may use: none of them needs a network."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn.functional import pad

from ddp_trainer.config.data import DigitsConfig
from ddp_trainer.data.datasets.digits import build_digits
from ddp_trainer.data.datasets.fashion_mnist import DEBIAN_FOLDER

needs_fashion_mnist = pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
"""For tests of the real Fashion-MNIST; all others use `write_fashion_mnist`."""


def write_fashion_mnist(folder: Path, *, num_train: int = 600, num_test: int = 200) -> Path:
    """Write handwritten digits of 28×28 pixels as Fashion-MNIST's files, raw and compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    datasets: Any = build_digits(DigitsConfig())
    for prefix, split, count in (
        ("train", datasets.train, num_train),
        ("t10k", datasets.eval, num_test),
    ):
        ids = [number % len(split.labels) for number in range(count)]
        large = split.images[ids, 0].repeat_interleave(3, 1).repeat_interleave(3, 2)
        images = encode_idx(pad(large, (2, 2, 2, 2)))
        labels = encode_idx(split.labels[ids].byte())
        for name, content in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{prefix}-{name}-ubyte").write_bytes(content)
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    return folder


def encode_idx(array: Tensor) -> bytes:
    """Return a uint8 tensor as the content of an IDX file."""
    sizes = b"".join(size.to_bytes(4) for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.numpy().tobytes()
