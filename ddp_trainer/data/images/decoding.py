"""Decodes image files of any size and format, and crops and scales the images."""

import io
import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from ddp_trainer.data.dataset import BadImageError, to_tensor
from ddp_trainer.data.images.file_index import Array

decode_image: Any = None
with suppress(ImportError, OSError, RuntimeError):
    # torchcodec comes with the extra `images`, and is twice as fast as Pillow
    from torchcodec.decoders import decode_image

TORCHCODEC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF")
"""First bytes of JPEG, PNG, GIF and WebP files, which torchcodec decodes, as it does AVIF."""
MAX_PIXELS = 100_000_000
"""Largest image that is decoded, so that the images of several threads fit into memory."""
ASPECT = math.log(4 / 3)
"""The logarithm of the largest ratio of the sides of a random crop."""
CENTER = 0.875
"""The side of the center crop, as a share of the shorter side of an image: 224 of 256."""
MAX_ASPECT = 4
"""Largest ratio of the sides of an image that `shrink` returns."""


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def decoder_name() -> str:
    """Return name and version of the library that decodes most formats."""
    package = "Pillow" if decode_image is None else "torchcodec"
    return f"{package}-{version(package)}"


def decode(data: Array) -> Tensor:
    """Return the image, or the first frame, of a file as RGB, uint8 [3, H, W].

    It is rotated as its EXIF data say. data: the content of the file, uint8 [bytes]. Raises
    BadImageError if it is empty, truncated, too large or no image.
    """
    # because Pillow's own limit, of which it only warns, is lower than MAX_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        width, height = jpeg_size(data) or Image.open(io.BytesIO(data.data)).size
        if width * height > MAX_PIXELS:
            limit = f"the maximum is {MAX_PIXELS / 1e6:.0f} million"
            raise BadImageError(f"it has {width} × {height} pixels, and {limit}: scale it down")
        return torchcodec_decode(data) if is_for_torchcodec(data) else pillow_decode(data)
    except (BadImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        reason = "its format is unknown, or it is not an image" if len(data) else "it is empty"
        raise BadImageError(reason) from error
    except Exception as error:  # decoders raise anything
        if "allocate memory" in str(error):
            raise
        raise BadImageError(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error


def is_for_torchcodec(data: Array) -> bool:
    """Return whether torchcodec is installed and decodes the format of `data`."""
    head = data[:8].tobytes()
    return decode_image is not None and (head.startswith(TORCHCODEC) or head[4:] == b"ftyp")


def torchcodec_decode(data: Array) -> Tensor:
    """Return the first frame of an image file, decoded by torchcodec: uint8 [3, H, W]."""
    image = decode_image(torch.from_numpy(data), mode="RGB")
    return image if image.ndim == 3 else image[0]


def jpeg_size(data: Array) -> tuple[int, int] | None:
    """Return width and height from a JPEG's header; None if there is none. Pillow takes 50 µs.

    Source: ITU-T T.81, B.1.1 and B.2.2: a segment is 0xFF, its kind and its length; the frame
    segment has the size.
    """
    head = data[:65536].tobytes()
    at = 2
    while head.startswith(b"\xff\xd8") and at + 9 <= len(head) and head[at] == 0xFF:
        if 0xC0 <= head[at + 1] <= 0xCF and head[at + 1] not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", head, at + 5)
            return (width, height) if height else None
        at += 2 + int.from_bytes(head[at + 2 : at + 4])
    return None


def pillow_decode(data: Array) -> Tensor:
    """Return the first frame of an image file, decoded by Pillow: uint8 [3, H, W]."""
    with Image.open(io.BytesIO(data.data)) as opened:
        turned: Any = ImageOps.exif_transpose(opened)
        if turned.mode.startswith("I"):  # 16-bit values, of which convert would keep the low bits
            turned = Image.fromarray((np.asarray(turned).clip(0, 65535) // 257).astype(np.uint8))
        return to_tensor(turned.convert("RGB"))


def random_box(height: int, width: int, draws: Sequence[float], min_area: float) -> Box:
    """Return a random crop, which four random numbers `draws` in [0, 1) choose.

    Its area is drawn from `min_area` to 1 times the area of the image, and its ratio of width to
    height from 3:4 to 4:3. Then a side that is longer than that of the image is shortened, so area
    and ratio may be outside these ranges.

    Source: Szegedy et al., Going Deeper with Convolutions, 2014 (arXiv 1409.4842), section on
    training.
    """
    area, aspect, down, right = draws
    area = (min_area + (1 - min_area) * area) * height * width
    aspect = math.exp((2 * aspect - 1) * ASPECT)
    rows = min(height, max(1, round(math.sqrt(area / aspect))))
    columns = min(width, max(1, round(math.sqrt(area * aspect))))
    return Box(int(down * (height - rows + 1)), int(right * (width - columns + 1)), rows, columns)


def center_box(height: int, width: int) -> Box:
    """Return the central square; its side is `CENTER` × the shorter side."""
    side = max(1, round(CENTER * min(height, width)))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def crop(image: Tensor, draws: Sequence[float] | None, *, min_area: float, side: int) -> Tensor:
    """Return a crop of an image, scaled to a square: uint8 [C, H, W] -> [C, side, side].

    draws: four random numbers in [0, 1) for `random_box`; None: `center_box`. min_area: see
    `random_box`.
    """
    height, width = image.shape[1:]
    box = center_box(height, width) if draws is None else random_box(height, width, draws, min_area)
    return resize(image, box, (side, side))


def resize(image: Tensor, box: Box, size: tuple[int, int]) -> Tensor:
    """Return the part `box` of an image, scaled with antialiasing: [C, H, W] -> [C, *size]."""
    part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
    # scaling a copy is twice as fast as scaling a view
    part = part.contiguous(memory_format=torch.channels_last)
    return interpolate(part, size=size, mode="bilinear", antialias=True)[0]


def shrink(image: Tensor, short_side: int) -> Tensor:
    """Return an image scaled down until its short side is `short_side`: [3, H, W] -> [3, h, w].

    A smaller image is not scaled up. If the long side is more than `MAX_ASPECT` times the short
    side, equal parts at both of its ends are cut off.
    """
    height, width = image.shape[1:]
    longest = MAX_ASPECT * min(height, width)
    rows = min(height, longest)
    columns = min(width, longest)
    top = (height - rows) // 2
    left = (width - columns) // 2
    part = image[None, :, top : top + rows, left : left + columns]
    if (scale := short_side / min(rows, columns)) >= 1:
        return part[0]
    size = (max(short_side, round(rows * scale)), max(short_side, round(columns * scale)))
    return interpolate(part, size=size, mode="bilinear", antialias=True)[0]
