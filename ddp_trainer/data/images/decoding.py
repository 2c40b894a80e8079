"""Decodes image files of any size and format, and crops and scales the images."""

import io
import math
import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from ddp_trainer.config.errors import one_line
from ddp_trainer.data.dataset import BadImageError, to_tensor
from ddp_trainer.data.images.file_index import Array

decode_image: Any = None
with suppress(ImportError, OSError, RuntimeError):
    # torchcodec is installed with the extra `images`; it is twice as fast as Pillow
    from torchcodec.decoders import decode_image

PILLOW_FORMATS = (
    "AVIF",
    "BMP",
    "DIB",
    "GIF",
    "ICO",
    "JPEG",
    "JPEG2000",
    "PNG",
    "PPM",
    "TGA",
    "TIFF",
    "WEBP",
)
"""Formats of pictures. Pillow would read EPS too, by running Ghostscript."""
TORCHCODEC_FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "AVIF")
"""Pillow's names of the formats that torchcodec decodes."""
MAX_PIXELS = 100_000_000
"""Largest number of pixels to decode, so that the images of several threads fit into memory."""
ASPECT = math.log(4 / 3)
"""The logarithm of the largest ratio of the sides of a random crop."""
CENTER = 0.875
"""The side of the center crop, as a share of the shorter side of an image: 224 of 256."""

LUMA = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in a gray value, from ITU-R BT.601, as in Pillow."""
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
"""The first bytes of a PNG file, before width and height."""
NPY = b"\x93NUMPY"
"""The first bytes of a file of numpy.save."""


class Box(NamedTuple):
    """A rectangular part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def decoder_name() -> str:
    """Return name and version of the decoder for most formats, for example Pillow-12.0.0."""
    package = "Pillow" if decode_image is None else "torchcodec"
    return f"{package}-{version(package)}"


def decode(data: Array, channels: int = 3) -> Tensor:
    """Return the image, or the first frame, of a file, uint8 [channels, H, W].

    The image is rotated as its EXIF data require. Images with other numbers of channels than 1 and
    3 are arrays of numpy.save, [C, H, W] or [H, W, C], TIFF files with a page for each channel, and
    files with so many channels, where a palette is RGBA. Values of more than 8 bits are scaled, see
    `in_eight_bits`.

    data: the content of the file, uint8 [bytes].

    Raises:
        BadImageError: the file is empty, truncated or not an image, the image is too large, or its
            channels cannot be converted.
    """
    # because Pillow would print warnings for some images with fewer pixels than MAX_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        if data[: len(NPY)].tobytes() == NPY:
            return with_channels(array_decode(data, channels), channels)
        name, (width, height) = format_and_size(data)
        check_size(height, width)
        is_deep = name == "PNG" and data[24:26].tolist() == [16, 0]  # gray, 16 bits
        needs_pillow = channels not in (1, 3) or name not in TORCHCODEC_FORMATS or is_deep
        if needs_pillow or decode_image is None:
            with Image.open(io.BytesIO(data.data), formats=known_formats()) as opened:
                image = picture_pixels(opened, channels)
        else:
            image = decode_image(torch.from_numpy(data), mode="RGB")
        return with_channels(image if image.ndim == 3 else image[0], channels)
    except (BadImageError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        reason = "its format is unknown, or it is not an image" if len(data) else "it is empty"
        raise BadImageError(reason) from error
    except Exception as error:  # decoders may raise anything
        if "allocate memory" in str(error):
            raise
        # without the place in torchcodec's source, such as "decode, /src/Jpeg.cpp:287, "
        reason = re.sub(r"^.*\.cpp:\d+, ", "", str(error))
        raise BadImageError(one_line(f"{type(error).__name__}: {reason}")) from error


@cache
def known_formats() -> list[str]:
    """Return those of `PILLOW_FORMATS` that this Pillow can read."""
    Image.init()
    return [name for name in PILLOW_FORMATS if name in Image.OPEN]


def format_and_size(data: Array) -> tuple[str | None, tuple[int, int]]:
    """Return Pillow's name of the format of an image file, and (width, height) of the image.

    The headers of PNG and JPEG are read without Pillow, which takes 100 µs.

    Source: ITU-T T.81, B.1.1 and B.2.2: a segment begins with 0xFF, its kind and its length; the
    frame segment has the size of the image. PNG specification, 11.2.1: IHDR begins with the size.
    """
    head = data[:65536].tobytes()
    if head.startswith(PNG) and len(head) >= 24:
        width, height = struct.unpack_from(">II", head, 16)
        return "PNG", (width, height)
    at = 2
    while head.startswith(b"\xff\xd8") and at + 9 <= len(head) and head[at] == 0xFF:
        if 0xC0 <= head[at + 1] <= 0xCF and head[at + 1] not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", head, at + 5)
            return "JPEG", (width, height)
        at += 2 + int.from_bytes(head[at + 2 : at + 4])
    with Image.open(io.BytesIO(data.data), formats=known_formats()) as opened:
        return opened.format, opened.size


def picture_pixels(picture: Image.Image, channels: int) -> Tensor:
    """Return the pixels of a picture that Pillow has opened, uint8 [channels, H, W].

    Raises:
        BadImageError: the pixels are floating-point numbers, or the picture is too large.
        ChannelsError: the channels cannot be converted.
    """
    pixels = rgb_pixels(picture) if channels in (1, 3) else page_pixels(picture, channels)
    return with_channels(pixels, channels)


def rgb_pixels(picture: Image.Image) -> Tensor:
    """Return the current frame of a picture, rotated as its EXIF data require: uint8 [3, H, W]."""
    turned: Any = ImageOps.exif_transpose(picture)
    if turned.mode == "F":  # convert would clip its values, of an unknown range
        raise BadImageError("its pixels are floating-point numbers: convert it to 8 bits")
    if turned.mode.startswith("I"):  # more than 8 bits, which convert would clip at 255
        turned = Image.fromarray(in_eight_bits(np.asarray(turned)))
    return to_tensor(turned.convert("RGB"))


def page_pixels(picture: Image.Image, channels: int) -> Tensor:
    """Return a picture whose pages are its channels, or whose only page has all of them.

    uint8 [C, H, W]. Only TIFF files have pages; of other pictures, the current frame is read.
    Raises ChannelsError if it has too many pages, or several, of which one is in color.
    """
    pages: list[Array] = []
    for page in ImageSequence.Iterator(picture) if picture.format == "TIFF" else [picture]:
        check_size(page.height, page.width)
        if len(pages) == channels:
            raise ChannelsError(
                f"it has more than {channels} pages, and data.channels={channels} takes one"
                " page for each channel: set data.channels to the number of pages"
            )
        turned: Any = ImageOps.exif_transpose(page)
        if turned.mode in ("P", "PA") or (turned.mode, channels) == ("LA", 4):
            turned = turned.convert("RGBA")  # the pixels of P and PA are indices into a palette
        pages.append(np.moveaxis(in_eight_bits(np.atleast_3d(np.asarray(turned))), 2, 0))
    if len(pages) > 1 and any(len(page) > 1 for page in pages):
        raise ChannelsError(
            "it has several pages, and one has several channels or a palette: convert each page to"
            " gray"
        )
    return torch.from_numpy(np.concatenate(pages))


def in_eight_bits(values: Array) -> Array:
    """Return `values` as uint8.

    Whole numbers from 0 are scaled from 0 … 2^b - 1 to 0 … 255, for b bits of the largest value, at
    least 8. Other numbers are scaled from their range, and True is 255. Raises BadImageError if a
    number is not finite.
    """
    if values.dtype == np.uint8:
        return values
    if values.dtype == bool:
        return values * np.uint8(255)
    low = float(values.min())
    high = float(values.max())
    if values.dtype.kind != "f" and low >= 0:
        low = 0.0
        high = 2.0 ** max(8, int(high).bit_length()) - 1
    if not math.isfinite(high - low):
        raise BadImageError("it has values that are not finite")
    from_low = np.subtract(values, low, dtype=np.float64)  # because float16 would overflow
    return (from_low / (high - low or 1) * 255).round().astype(np.uint8)


def check_size(height: int, width: int) -> None:
    """Raise BadImageError if an image has more than `MAX_PIXELS`."""
    if width * height > MAX_PIXELS:
        limit = f"the maximum is {MAX_PIXELS / 1e6:.0f} million"
        raise BadImageError(f"it has {width} × {height} pixels, and {limit}: scale it down")


def array_decode(data: Array, channels: int) -> Tensor:
    """Return the array in a file of numpy.save, uint8 [C, H, W]. Raises: see `decode`."""
    file = io.BytesIO(data.data)
    is_old = np.lib.format.read_magic(file) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if is_old else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.kind not in "uif" or len(shape) not in (2, 3) or not math.prod(shape):
        raise BadImageError(f"it is an array of {dtype} {list(shape)}, and no image")
    check_size(*sorted(shape)[-2:])
    # This does not allocate what a false header asks for, as numpy.load would.
    flat = np.frombuffer(data.data, dtype, math.prod(shape), file.tell())
    values = flat.reshape(shape, order="F" if is_fortran else "C")
    if values.ndim == 2:
        values = values[None]
    elif values.shape[0] != channels and values.shape[2] == channels:
        values = np.moveaxis(values, 2, 0)
    elif values.shape[0] not in (1, 3, channels):
        raise BadImageError(
            f"it is an array of shape {list(shape)}, and the model expects [{channels}, H, W] or"
            f" [H, W, {channels}]: convert the array"
        )
    return torch.from_numpy(np.stack([in_eight_bits(channel) for channel in values]))


def random_box(height: int, width: int, draws: Sequence[float], min_area: float) -> Box:
    """Return the random crop that is chosen by `draws`, four random numbers in [0, 1).

    The area of the crop is drawn from `min_area` to 1 times the area of the image, and its ratio of
    width to height from 3:4 to 4:3. Then a side that is longer than that of the image is shortened,
    so area and ratio may be outside of these ranges.

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
    """Return the central square of an image; its side is `CENTER` × the image's shorter side."""
    side = max(1, round(CENTER * min(height, width)))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def resize(image: Tensor, box: Box, size: tuple[int, int]) -> Tensor:
    """Return the part `box` of an image, scaled with antialiasing: [C, H, W] -> [C, *size]."""
    part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
    # a contiguous copy, because scaling it is twice as fast as scaling a view
    part = part.contiguous(memory_format=torch.channels_last)
    return interpolate(part, size=size, mode="bilinear", antialias=True)[0]


def shrink(image: Tensor, short_side: int) -> Tensor:
    """Return an image scaled down until its shorter side is `short_side`: [C, H, W] -> [C, h, w].

    A smaller image keeps its size.
    """
    height, width = image.shape[1:]
    scale = min(1, short_side / min(height, width))
    size = (round(height * scale), round(width * scale))
    return resize(image, Box(0, 0, height, width), size)


class ChannelsError(BadImageError, ValueError):
    """An image has a number of channels that cannot be converted."""


def with_channels(image: Tensor, channels: int) -> Tensor:
    """Return `image`, uint8 [c, h, w], with `channels` channels: RGB to gray, or gray repeated.

    Raises:
        ChannelsError: another conversion would be needed.
    """
    if image.shape[0] == channels:
        return image
    if (image.shape[0], channels) == (3, 1):
        weights = torch.tensor(LUMA)[:, None, None]
        return (image * weights).sum(0, keepdim=True).round().to(torch.uint8)
    if image.shape[0] == 1:
        return image.expand(channels, -1, -1)
    raise ChannelsError(
        f"the image has {image.shape[0]} channels, and the model expects {channels}: convert the"
        " image"
    )
