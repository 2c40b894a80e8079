"""A split of image files, read from the files or from a cache."""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.images.decoding import CENTER, crop, decode, decoder_name, shrink
from ddp_trainer.data.images.file_index import FileIndex
from ddp_trainer.data.images.pixel_cache import PixelCache, open_cache
from ddp_trainer.distributed.environment import usable_cores

BAD_FILE_ERRORS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP)
"""Errors that make one file unreadable; others, such as of a server, may be temporary."""


class UnreadableFileError(BadImageError):
    """The file cannot be read, for example because of its permissions."""


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """A split of image files.

    An item is the center crop, scaled to uint8 [3, S, S] (S = image_size), and the label.
    """

    center_crop = CENTER

    def __init__(
        self, files: FileIndex, class_names: list[str], *, image_size: int, min_crop_area: float
    ) -> None:
        """class_names: name of each label. min_crop_area: smallest share of a random crop."""
        self.files = files
        self.image_size = image_size
        self.min_crop_area = min_crop_area
        numbers = list(range(len(class_names)))
        if files.class_names != class_names:  # else labels are right even if two names are equal
            numbers = [class_names.index(name) for name in files.class_names]
        self.labels = torch.tensor(numbers).repeat_interleave(torch.from_numpy(files.counts))
        """int64 [N]: the class of each image."""
        self.cache: PixelCache | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(index, None)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an item."""
        return 3, self.image_size, self.image_size

    def read(self, index: int, draws: Sequence[float] | None) -> tuple[Tensor, int]:
        """Return a crop of image `index`, scaled to uint8 [3, S, S], and the image's label.

        draws: four random numbers in [0, 1) that choose the crop; None: the center crop.

        Raises:
            BadImageError: the file cannot be read or decoded. OSError, RuntimeError: another error,
            perhaps temporary.
        """
        image = self.decode(index) if self.cache is None else self.cache[index]
        part = crop(image, draws, min_area=self.min_crop_area, side=self.image_size)
        return part, int(self.labels[index])

    def decode(self, index: int) -> Tensor:
        """Return a whole image, uint8 [3, H, W], from its file."""
        size = int(self.files.files["size"][index])
        try:
            data = np.fromfile(self.files.path(index), np.uint8)
        except OSError as error:
            if error.errno in BAD_FILE_ERRORS:
                raise UnreadableFileError(error.strerror) from error
            raise
        if len(data) != size:
            with suppress(OSError):
                self.files.saved_in.unlink()
            raise RuntimeError(
                f"its size changed from {size} to {len(data)} bytes after the scan: start the run"
                " again"
            )
        return decode(data)

    def path(self, index: int) -> str:
        """Return the path of the file `index`."""
        return os.fsdecode(self.files.path(index))

    def fingerprint(self) -> str:
        """Return a digest of names, sizes and labels, and the size of the images."""
        return f"{self.files.digest()} {self.image_size}"

    def open_cache(self, cache_dir: Path) -> None:
        """Open the cache of these images in `cache_dir`, or build it; `read` then uses it.

        Raises ConfigError or TransientError if the cache, or an image file from which it is built,
        cannot be used.
        """
        side = round(self.image_size / CENTER)
        name = f"{self.files.digest(with_times=True)[:16]}-{side}-{decoder_name()}.cache"
        self.cache = open_cache(
            cache_dir / name,
            lambda index: self.shrunk(index, side),
            count=len(self),
            num_threads=usable_cores(),
            task=f"building the cache of {self.files.root}",
        )

    def shrunk(self, index: int, side: int) -> Tensor:
        """Return image `index` for the cache, scaled down until its short side is `side` pixels.

        The cache records a BadImageError; other errors end the building of the cache.
        """
        try:
            return shrink(self.decode(index), side)
        except UnreadableFileError as error:
            raise ConfigError(
                f"{self.path(index)} cannot be read: {error}; give this user the right, or remove"
                " the file"
            ) from error
        except BadImageError:
            raise
        except (OSError, RuntimeError) as error:
            raise TransientError(f"{self.path(index)} cannot be read: {error}") from error
