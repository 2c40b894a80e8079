"""Image files of any size and format: decoded, cropped and resized to uint8 [3, S, S] as they are read."""

import hashlib
import io
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

try:
    from torchcodec.decoders import decode_image
except (ImportError, OSError, RuntimeError):  # the extra `images`; twice as fast as Pillow
    decode_image = None

ONLY_PILLOW = (b"BM", b"II*\0", b"MM\0*", b"P5", b"P6")
"""The first bytes of BMP, TIFF and PPM files, which torchcodec does not decode."""
ASPECT = math.log(4 / 3)
"""The logarithm of the largest ratio of width to height of a random crop, and of height to width."""
CENTER = 0.875
"""The side of the square in the center that an evaluation sees, as a share of the shorter side: 224 of 256."""


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """A split of image files. An item is the center of an image, uint8 [3, S, S], and its label.

    The names are one buffer of bytes, of which worker threads share the only copy.
    """

    def __init__(
        self, root: Path, files: list[tuple[bytes, int, int]], *, image_size: int, min_crop_area: float
    ) -> None:
        """files: name relative to `root`, size in bytes and label of each file. min_crop_area: see `random_box`."""
        self.root, self.image_size, self.min_crop_area = root, image_size, min_crop_area
        self._names = b"".join(name for name, _, _ in files)
        self._ends = torch.tensor([len(name) for name, _, _ in files], dtype=torch.int64).cumsum(0)
        self._sizes = torch.tensor([size for _, size, _ in files], dtype=torch.int64)
        self.labels = torch.tensor([label for _, _, label in files], dtype=torch.int64)
        """int64 [N]."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(index, None)

    def read(self, index: int, draws: Tensor | None) -> tuple[Tensor, int]:
        """Return a random part of an image, chosen by `draws` [4] in [0, 1), or its center without; and its label."""
        image = decode(self.path(index).read_bytes())
        height, width = image.shape[1:]
        box = center_box(height, width) if draws is None else random_box(height, width, draws, self.min_crop_area)
        return resize(image, box, self.image_size), int(self.labels[index])

    def path(self, index: int) -> Path:
        """Return the path of a file."""
        start = int(self._ends[index - 1]) if index else 0
        return self.root / os.fsdecode(self._names[start : int(self._ends[index])])

    def fingerprint(self) -> str:
        """Return a digest of the files' names, sizes and labels, and of the size of the images."""
        digest = hashlib.sha256(self._names)
        for part in (self._ends, self._sizes, self.labels):
            digest.update(part.numpy().data)
        return f"{digest.hexdigest()} {self.image_size}"


def decode(data: bytes) -> Tensor:
    """Return the image in `data` as RGB, uint8 [3, H, W], turned as its EXIF data say; of several frames the first.

    Raises:
        OSError, RuntimeError, SyntaxError, ValueError: it is empty, truncated, or not an image.
    """
    if decode_image is not None and not data.startswith(ONLY_PILLOW):
        image = decode_image(data, mode="RGB")
        return image if image.ndim == 3 else image[0]
    with Image.open(io.BytesIO(data)) as opened:
        turned: Any = ImageOps.exif_transpose(opened)
        if turned.mode.startswith("I"):  # 16 bits, of which convert would keep the low ones
            turned = Image.fromarray((np.asarray(turned) // 257).astype(np.uint8))
        return torch.from_numpy(np.array(turned.convert("RGB"))).permute(2, 0, 1)


def random_box(height: int, width: int, draws: Tensor, min_area: float) -> Box:
    """Return a part with `min_area` to all of the area and an aspect of 3:4 to 4:3, as far as the image has it.

    Source: Szegedy et al., Going Deeper with Convolutions, 2014 (arXiv 1409.4842): training.
    """
    area, aspect, down, right = draws.tolist()
    area = (min_area + (1 - min_area) * area) * height * width
    aspect = math.exp((2 * aspect - 1) * ASPECT)
    rows = min(height, max(1, round(math.sqrt(area / aspect))))
    columns = min(width, max(1, round(math.sqrt(area * aspect))))
    return Box(int(down * (height - rows + 1)), int(right * (width - columns + 1)), rows, columns)


def center_box(height: int, width: int) -> Box:
    """Return the square in the center whose side is `CENTER` of the shorter side."""
    side = max(1, round(CENTER * min(height, width)))
    return Box((height - side) // 2, (width - side) // 2, side, side)


def resize(image: Tensor, box: Box, size: int) -> Tensor:
    """Return the part `box` of an image, scaled with antialiasing. image: uint8 [3, H, W] -> [3, size, size]."""
    part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width]
    return interpolate(part, size=(size, size), mode="bilinear", antialias=True)[0]
