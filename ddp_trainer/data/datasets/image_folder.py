"""A folder of images: a folder per class, in folders for training and evaluation or in one that is split."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_trainer.config.data import ImageFolderConfig
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.data.image_files import ImageFiles

EXTENSIONS = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
EVALUATION_FOLDERS = ("val", "validation", "valid", "test")


@dataclass(slots=True)
class Scanned:
    """What a scan has found: the names of the class folders, and (name, size, label) of each file, sorted."""

    class_names: list[str]
    files: list[tuple[bytes, int, int]]


def build_image_folder(config: ImageFolderConfig) -> Datasets:
    """Return the images in data.root; ConfigError if there are none, or a folder does not fit."""
    require(config.root is not None, "data.root is missing: give the folder of images, data.root=…")
    root = Path(config.root or "").expanduser()
    require(root.is_dir(), f"data.root={config.root} must be a folder of images: it is not a folder")
    min_crop_area = config.augment.random_resized_crop or 1.0

    def split(folder: Path, scanned: Scanned) -> ImageFiles:
        return ImageFiles(folder, scanned.files, image_size=config.image_size, min_crop_area=min_crop_area)

    if not (root / "train").is_dir():
        require(
            config.validation_fraction > 0,
            f"data.root={config.root} has no folder train: make root/train/<class> and root/val/<class>, or split the "
            "folders that are there with data.validation_fraction=0.2",
        )
        scanned = scan(root)
        files = split(root, scanned)
        return Datasets(train=files, eval=files, class_names=scanned.class_names)
    train = scan(root / "train")
    folder = next((root / name for name in EVALUATION_FOLDERS if (root / name).is_dir()), None)
    if folder is None:
        require(
            config.validation_fraction > 0,
            f"data.root={config.root} has no folder val or test: make one, or set data.validation_fraction=0.2",
        )
        files = split(root / "train", train)
        return Datasets(train=files, eval=files, class_names=train.class_names)
    evaluation = scan(folder, class_names=train.class_names)
    return Datasets(train=split(root / "train", train), eval=split(folder, evaluation), class_names=train.class_names)


def scan(folder: Path, class_names: list[str] | None = None) -> Scanned:
    """Return the images below each class folder of `folder`, in a fixed order.

    class_names: those that there may be; without it, those that there are, each with an image at least. ConfigError
    names a folder that does not fit or cannot be read.
    """
    try:
        found = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
        names = class_names or found
        if unknown := sorted(set(found) - set(names)):
            raise ConfigError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")
        require(len(names) > 1, f"{folder} must have a folder for each of two or more classes and has {len(names)}")
        files = []
        for label, name in enumerate(names):
            images = sorted(walk(folder / name, b"", set())) if name in found else []
            require(class_names is not None or bool(images), f"{folder / name} has no image: add some, or remove it")
            prefix = os.fsencode(name) + b"/"
            files += [(prefix + image, size, label) for image, size in images]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    require(bool(files), f"{folder} has no images: files that end in {', '.join(EXTENSIONS)}")
    return Scanned(names, files)


def walk(folder: Path, prefix: bytes, visited: set[tuple[int, int]]) -> Iterator[tuple[bytes, int]]:
    """Yield name, relative to the first folder, and size of each image in `folder` and below it, each folder once."""
    status = os.stat(folder)
    if (status.st_dev, status.st_ino) in visited:  # a link back
        return
    visited.add((status.st_dev, status.st_ino))
    for entry in os.scandir(folder):
        name = prefix + os.fsencode(entry.name)
        if entry.is_dir():
            yield from walk(Path(entry.path), name + b"/", visited)
        elif entry.name.lower().endswith(EXTENSIONS) and entry.is_file():
            yield name, entry.stat().st_size
