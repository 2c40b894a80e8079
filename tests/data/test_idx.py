"""Reading IDX files, whole and damaged."""

import gzip
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.data.datasets.idx import find_idx, read_idx

IMAGES = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
LABELS = torch.tensor([7, 3], dtype=torch.uint8)


def encode(array: Tensor) -> bytes:
    """Return `array` as the format's description has it: magic number, sizes, bytes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.dim()]) + sizes + bytes(array.flatten().tolist())


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gz"])
@pytest.mark.parametrize("array", [IMAGES, LABELS], ids=["images", "labels"])
def test_what_was_written_is_read(array: Tensor, pack: type[bytes], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(pack(encode(array)))
    assert torch.equal(read_idx(path, dimensions=array.dim()), array)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gz"])
def test_any_truncation_is_refused(pack: type[bytes], tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole = pack(encode(IMAGES))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"is damaged|cannot be read|is not an IDX file"):
            read_idx(path, dimensions=3)


def test_any_flipped_byte_of_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    whole = gzip.compress(encode(IMAGES), mtime=0)
    # the rest of the gzip header says when and where
    for position in [
        0,
        1,
        2,
        *range(10, len(whole)),
    ]:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with pytest.raises(ConfigError, match=str(path)):
            read_idx(path, dimensions=3)


@pytest.mark.parametrize(
    ("data", "dimensions", "expected"),
    [
        (
            b"",
            3,
            "is not an IDX file of images: it begins with nothing; are images and labels swapped?",
        ),
        (b"<!DOCTYPE html>", 3, "is not an IDX file of images: it begins with 3c 21 44 4f; "),
        (
            encode(IMAGES).replace(b"\x08", b"\x0d", 1),
            3,
            "is not an IDX file of images: it begins with 00 00 0d 03; ",
        ),
        (encode(LABELS), 3, "is not an IDX file of images: it begins with 00 00 08 01; "),
        (encode(IMAGES), 1, "is not an IDX file of labels: it begins with 00 00 08 03; "),
        (encode(LABELS) + b"!", 1, "is damaged: it has 11 bytes and its header says 10"),
        (encode(LABELS)[:-1], 1, "is damaged: it has 9 bytes and its header says 10"),
        (encode(IMAGES[:0]), 3, "is empty: its header says 0 × 3 × 4 images"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    data: bytes, dimensions: int, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        read_idx(path, dimensions=dimensions)
    assert str(refused.value).startswith(f"{path} {expected}")


def test_a_raw_file_is_found_before_a_compressed_one(tmp_path: Path) -> None:
    (tmp_path / "file.gz").touch()
    assert find_idx(tmp_path, "file") == tmp_path / "file.gz"
    (tmp_path / "file").touch()
    assert find_idx(tmp_path, "file") == tmp_path / "file"
