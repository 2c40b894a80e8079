"""A split of image files, read from the files or from a cache."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.config.data import Cache, ImageFilesConfig
from ddp_trainer.config.errors import USER_ERRORS
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.images.decoding import (
    CENTER,
    center_box,
    decode,
    decoder_name,
    random_box,
    resize,
    shrink,
)
from ddp_trainer.data.images.file_index import FileIndex, path_errors
from ddp_trainer.data.images.pixel_cache import PixelCache, open_cache
from ddp_trainer.distributed.environment import user_cache


def cache_folder(config: ImageFilesConfig) -> Path:
    """Return the folder of saved indices and caches: data.cache_dir, or else that of the user."""
    return user_cache() if config.cache_dir is None else Path(os.path.expanduser(config.cache_dir))


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """A split of image files, as a map-style data set.

    An item is the center crop, scaled to uint8 [C, S, S], where S is `image_size`, and the label.
    """

    center_crop = CENTER

    def __init__(self, files: FileIndex, class_names: list[str], config: ImageFilesConfig) -> None:
        """class_names: the name of each label. With data.cache=uint8, open or build the cache.

        Raises:
            ConfigError, TransientError: the cache cannot be used, or an image file from which it is
                built cannot be read.
        """
        self.files = files
        self.image_size = config.image_size
        self.image_shape = (config.channels, config.image_size, config.image_size)
        self.min_crop_area = config.augment.random_resized_crop or 1.0
        number = {name: label for label, name in enumerate(class_names)}
        numbers = torch.tensor([number[name] for name in files.class_names])
        self.labels = numbers.repeat_interleave(torch.from_numpy(files.counts))
        """int64 [N]: the class of each image."""
        if len(files.groups):
            self.groups = torch.from_numpy(files.groups)
        if len(files.weights):
            self.weights = torch.from_numpy(files.weights)
        self.cache: PixelCache | None = None
        if config.cache is Cache.uint8:
            self.cache = self._open_cache(cache_folder(config))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(index, None)

    def read(self, index: int, draws: Sequence[float] | None) -> tuple[Tensor, int]:
        """Return a crop of image `index`, scaled to uint8 [C, S, S], and the image's label.

        draws: four random numbers in [0, 1) that choose the crop; None: the center crop.

        Raises:
            BadImageError: the file cannot be read or decoded.
            OSError, RuntimeError: another error, which may be temporary.
        """
        image = self.decode(index) if self.cache is None else self.cache[index]
        height, width = image.shape[1:]
        box = center_box(height, width)
        if draws is not None:
            box = random_box(height, width, draws, self.min_crop_area)
        part = resize(image, box, self.image_shape[1:])
        return part, int(self.labels[index])

    def decode(self, index: int) -> Tensor:
        """Return the whole image `index`, uint8 [C, H, W], from its file. Raises: see `read`."""
        try:
            data = self.files.read(index)
        except OSError as error:
            if error.errno in USER_ERRORS:
                raise BadImageError(error.strerror) from error
            raise  # because the error may be temporary
        return decode(data, self.image_shape[0])

    def path(self, index: int) -> str:
        """Return the path of the file `index`."""
        return self.files.path(index)

    def fingerprint(self) -> str:
        """Return a text: a digest of class names, file names and file sizes, and `image_size`."""
        return f"{self.files.digest()} {self.image_size}"

    def _open_cache(self, cache_dir: Path) -> PixelCache:
        """Return the cache of these images, which is opened or built in `cache_dir`."""
        side = round(self.image_size / CENTER)
        channels = self.image_shape[0]
        digest = self.files.digest(with_times=True)[:16]
        name = f"v4-{digest}-{side}x{channels}-{decoder_name()}.cache"

        def read(index: int) -> Tensor:
            with path_errors():  # because BadImageError would be recorded in the cache for good
                data = self.files.read(index)
            return shrink(decode(data, channels), side)

        return open_cache(
            cache_dir / name,
            read,
            count=len(self),
            channels=channels,
        )
