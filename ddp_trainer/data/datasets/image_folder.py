"""Images in one folder per class: train/<class> and val/<class>, or just <class>."""

import os
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.config.data import Cache, ImageFilesConfig, ImageFolderConfig
from ddp_trainer.config.errors import require
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.data.images.file_index import IMAGE_FILES, FileIndex, load_index
from ddp_trainer.data.images.image_files import ImageFiles
from ddp_trainer.distributed.environment import user_cache

EVALUATION_FOLDERS = ("val", "validation", "valid", "test")


def build_image_folder(config: ImageFolderConfig) -> Datasets:
    """Return the images in data.root; ConfigError if images or folders are missing."""
    root = root_folder(config)
    train_folder, eval_folder = find_splits(root, is_split=config.validation_fraction > 0)
    cache_dir = cache_folder(config)
    train = load_index(train_folder, cache_dir)
    count = len(train.class_names)
    require(
        count > 1,
        f"{train_folder} must have at least 2 folders, one for each class, and has {count}",
    )
    for name, images in zip(train.class_names, train.counts.tolist(), strict=True):
        require(
            images > 0,
            f"{train_folder / name} has no image: fill or remove the folder; images are"
            f" {IMAGE_FILES}",
        )
    evaluation = None if eval_folder is None else load_index(eval_folder, cache_dir)
    if evaluation is not None:
        check_evaluation(evaluation, train.class_names)

    images = image_files(train, train.class_names, config)
    held_out = images if evaluation is None else image_files(evaluation, train.class_names, config)
    return Datasets(train=images, eval=held_out, class_names=train.class_names)


def open_folder(config: ImageFolderConfig, class_names: list[str]) -> ImageFiles:
    """Return the images in the first of test, valid, validation and val in data.root.

    If none exists, they are the images of the class folders in data.root. Raises ConfigError if
    data.root is no folder, there is no image, or a class is not in `class_names`.
    """
    root = root_folder(config)
    folder = first_folder(root, EVALUATION_FOLDERS[::-1]) or root
    files = load_index(folder, cache_folder(config))
    check_evaluation(files, class_names)
    return image_files(files, class_names, config)


def root_folder(config: ImageFolderConfig) -> Path:
    """Return the folder data.root; ConfigError if it is missing."""
    require(config.root is not None, "data.root is missing: give the folder of images, data.root=…")
    root = Path(os.path.expanduser(config.root or ""))
    require(
        root.is_dir(),
        f"data.root={config.root} must be a folder of images, and there is no such folder",
    )
    return root


def first_folder(root: Path, names: Sequence[str]) -> Path | None:
    """Return the first of the folders `names` in `root` that exists."""
    return next((root / name for name in names if (root / name).is_dir()), None)


def image_files(files: FileIndex, class_names: list[str], config: ImageFilesConfig) -> ImageFiles:
    """Return the images of `files` as one split, with a cache if `config` asks for one."""
    min_crop_area = config.augment.random_resized_crop or 1.0
    images = ImageFiles(
        files, class_names, image_size=config.image_size, min_crop_area=min_crop_area
    )
    if config.cache is Cache.uint8:
        images.open_cache(cache_folder(config))
    return images


def cache_folder(config: ImageFilesConfig) -> Path:
    """Return the folder for lists of files and caches: data.cache_dir, or that of the user."""
    return user_cache() if config.cache_dir is None else Path(os.path.expanduser(config.cache_dir))


def find_splits(root: Path, *, is_split: bool) -> tuple[Path, Path | None]:
    """Return the folders of training and of evaluation images; None if `is_split`.

    Evaluation images are then a part of the training images (data.validation_fraction). ConfigError
    if a folder is missing.
    """
    if not (root / "train").is_dir():
        require(
            is_split,
            f"data.root={root} has no folder train: make {root}/train/<class> and"
            f" {root}/val/<class>, or split the existing class folders with"
            " data.validation_fraction=0.2",
        )
        return root, None
    if is_split:
        return root / "train", None
    evaluation = first_folder(root, EVALUATION_FOLDERS)
    require(
        evaluation is not None,
        f"data.root={root} has none of the folders {', '.join(EVALUATION_FOLDERS)}: make one, or"
        " set data.validation_fraction=0.2",
    )
    return root / "train", evaluation


def check_evaluation(files: FileIndex, class_names: list[str]) -> None:
    """Check that there are images, and only of classes in `class_names`; else ConfigError."""
    unknown = [name for name in files.class_names if name not in set(class_names)]
    require(
        not unknown,
        f"{files.root} has the class {unknown and unknown[0]!r}, which the training images do not"
        " have: remove it, or add images of this class to the training images",
    )
    require(len(files) > 0, f"{files.root} has no images: add {IMAGE_FILES}")
