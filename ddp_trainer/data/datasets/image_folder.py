"""Images in one folder per class: train/<class> and val/<class>, or just <class>."""

import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from ddp_trainer.config.data import ImageFolderConfig
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.data.images.file_index import (
    IMAGE_FILES,
    FileIndex,
    is_image,
    load_index,
    path_errors,
)
from ddp_trainer.data.images.image_files import ImageFiles, cache_folder

logger = logging.getLogger(__name__)

VALIDATION_FOLDERS = ("val", "validation", "valid")
EVALUATION_FOLDERS = (*VALIDATION_FOLDERS, "test")
"""Possible names of the folder of evaluation images; training uses the first that exists."""


def build_image_folder(config: ImageFolderConfig) -> Datasets:
    """Return the images in data.root.

    With data.validation_fraction or data.fold, both splits are the training images, and `hold_out`
    divides them.
    Raises ConfigError if data.root, a split or the images of a class are missing or unreadable.
    """
    root = root_folder(config)
    folders = find_splits(root, is_split=config.holds_out)
    if config.holds_out:
        warn_of_unused_folder(root, folders[0], config)
    indices = [load_index(folder, cache_folder(config)) for folder in folders]
    train = indices[0]
    count = len(train.class_names)
    require(
        count > 1,
        f"{train.root} must have at least 2 folders, one for each class, and has {count}",
    )
    for name, images in zip(train.class_names, train.counts.tolist(), strict=True):
        require(
            images > 0,
            f"{train.root / name} has no image: fill or remove the folder; images are"
            f" {IMAGE_FILES}",
        )
    for files in indices:
        check_evaluation(files, train.class_names)

    splits = [ImageFiles(files, train.class_names, config) for files in indices]
    return Datasets(
        train=splits[0],
        eval=splits[-1],
        class_names=train.class_names,
        eval_split=split_name(folders[-1]),
    )


def warn_of_unused_folder(root: Path, train: Path, config: ImageFolderConfig) -> None:
    """Log a warning if a folder in `root` looks like validation images, and is not used as such."""
    for folder in existing_folders(root, VALIDATION_FOLDERS):
        if train == root:
            logger.warning(
                "%s is taken for a class, because data.root=%s has no folder train: if it has"
                " validation images, move the class folders to %s, and set %s",
                folder,
                root,
                root / "train",
                config.hold_out_off,
            )
        else:
            logger.warning(
                "%s is not used, because %s holds out training images: to evaluate on the folder,"
                " set %s",
                folder,
                config.hold_out_key,
                config.hold_out_off,
            )


def split_name(folder: Path) -> str:
    """Return the name of the split in `folder`: "validation" if it is called so, else "test"."""
    return "validation" if folder.name in VALIDATION_FOLDERS else "test"


def open_test_folder(config: ImageFolderConfig, class_names: list[str]) -> ImageFiles:
    """Return the images in the folder test of data.root.

    Raises ConfigError if there is no such folder, no image in it, or `class_names` lacks a class.
    """
    root = root_folder(config)
    require(
        os.path.isdir(root / "test"),
        f"data.root={root} has no folder test: choose split=validation or split=train, or set"
        " data.root to another folder of images",
    )
    return open_classes(root / "test", config, class_names)


def open_other_folder(config: ImageFolderConfig, class_names: list[str]) -> tuple[str, ImageFiles]:
    """Return the images in data.root that are best to evaluate on, and the name of their split.

    They are in the first existing folder of test, val, validation and valid, or else in the class
    folders of data.root. Raises ConfigError if data.root is not a folder, there is no image, or
    `class_names` lacks a class.
    """
    root = root_folder(config)
    folder = [*existing_folders(root, ("test", *VALIDATION_FOLDERS)), root][0]
    return split_name(folder), open_classes(folder, config, class_names)


def open_classes(folder: Path, config: ImageFolderConfig, class_names: list[str]) -> ImageFiles:
    """Return the images in the class folders of `folder`; ConfigError: see `check_evaluation`."""
    files = load_index(folder, cache_folder(config))
    check_evaluation(files, class_names)
    return ImageFiles(files, class_names, config)


def root_folder(config: ImageFolderConfig) -> Path:
    """Return the path data.root; ConfigError if it is null or not a folder."""
    require(config.root is not None, "data.root is missing: give the folder of images, data.root=…")
    root = Path(os.path.expanduser(config.root or ""))
    require(
        os.path.isdir(root),
        f"data.root={config.root} must be a folder of images, and there is no such folder"
        + similar_folder(root),
    )
    return root


def similar_folder(path: Path) -> str:
    """Return ``; did you mean …?`` with a folder of a similar name beside `path`, or ""."""
    with suppress(OSError):
        names = [other.name for other in path.parent.iterdir() if other.is_dir()]
        for name in get_close_matches(path.name, names, n=1, cutoff=0.8):
            return f"; did you mean {shlex.quote(f'data.root={path.parent / name}')}?"
    return ""


def existing_folders(root: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders with one of `names` in `root` that exist."""
    return [root / name for name in names if os.path.isdir(root / name)]


def find_splits(root: Path, *, is_split: bool) -> list[Path]:
    """Return the folder of training images and, unless `is_split`, the folder of evaluation images.

    is_split: evaluation images are a part of the training images (`DataConfig.holds_out`).
    Raises ConfigError if a folder is missing.
    """
    if not os.path.isdir(root / "train"):
        check_is_root(root, is_split=is_split)
        require(
            is_split,
            f"data.root={root} has no folder train: make {root}/train/<class> and"
            f" {root}/val/<class>, or split the existing class folders with"
            " data.validation_fraction=0.2",
        )
        return [root]
    if is_split:
        return [root / "train"]
    folders = existing_folders(root, EVALUATION_FOLDERS)
    require(
        bool(folders),
        f"data.root={root} has none of the folders {', '.join(EVALUATION_FOLDERS)}: make one, or"
        " set data.validation_fraction=0.2",
    )
    return [root / "train", folders[0]]


def check_is_root(root: Path, *, is_split: bool) -> None:
    """Check that `root` is not the folder of a class nor, unless `is_split`, of a split.

    Raises:
        ConfigError: it is one; the message has the settings for the folder of all images.
    """
    with path_errors():
        entries = [entry for entry in os.scandir(root) if not entry.name.startswith(".")]
    is_class = any(map(is_image, entries)) and sum(entry.is_dir() for entry in entries) < 2
    path = Path(os.path.abspath(root))
    split = path.parent if is_class else path
    has_train = os.path.isdir(split.parent / "train")
    is_in_split = has_train and split.name in ("train", *EVALUATION_FOLDERS)
    if is_in_split and (is_class or not is_split):
        kind = "class" if is_class else "split"
        raise ConfigError(
            f"data.root={root} is the folder of one {kind}: set"
            f" {shlex.quote(f'data.root={split.parent}')}"
        )
    require(
        not is_class,
        f"data.root={root} has images, and not one folder of images for each class: if it is the"
        f" folder of one class, set {shlex.quote(f'data.root={path.parent}')}"
        " data.validation_fraction=0.2",
    )


def check_evaluation(files: FileIndex, class_names: list[str]) -> None:
    """Check that `files` has images, and only of classes in `class_names`; ConfigError if not."""
    for name in sorted(set(files.class_names) - set(class_names)):
        raise ConfigError(
            f"{files.root} has the class {name!r}, which the training images do not have: remove"
            " it, or add images of this class to the training images"
        )
    require(len(files) > 0, f"{files.root} has no images: add {IMAGE_FILES}")
