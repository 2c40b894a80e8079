"""The classification data sets of torchvision, by class name: in memory or as image files."""

import inspect
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets as torchvision_datasets

from ddp_trainer.config.data import TorchvisionDataConfig
from ddp_trainer.config.errors import ConfigError, require, suggestion
from ddp_trainer.data.dataset import Datasets, ImageTensors, Split, read_sample
from ddp_trainer.data.datasets.image_folder import cache_folder, image_files
from ddp_trainer.data.images.file_index import index_files
from ddp_trainer.distributed.environment import user_cache
from ddp_trainer.files import lock_file

LOCK_SECONDS = 3600.0
"""How long a rank waits for another rank that downloads."""
EVALUATION_SPLITS = ("test", "val", "valid")
SAMPLES = ("samples", "_samples", "imgs")
PATHS = ("_image_files", "_images")
LABELS = ("targets", "_labels", "labels")
"""Attributes of torchvision's classes with the (path, label), the path or the label of each image.
"""
USE_A_PLUGIN = "it is not supported; write a plug-in (docs/extending.md)"


class UnknownSplitError(ConfigError):
    """The class of torchvision has no split of that name."""


def build_torchvision_set(config: TorchvisionDataConfig) -> Datasets:
    """Return torchvision's data set `config.dataset`.

    Raises ConfigError if there is no such data set, it is not in data.root, or its samples are not
    images with a class.
    """
    kind = find_class(config.dataset)
    root = Path(os.path.expanduser(config.root)) if config.root else user_cache() / "torchvision"
    if config.download:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"data.root={root} must be a folder that can be written: {error.strerror}"
            raise ConfigError(reason) from error
    with ExitStack() as stack:
        # also without a download, because ImageNet extracts its archives
        if os.access(root, os.W_OK):
            lock = root / ".download.lock"
            holder = f"another process has been downloading to {root} for an hour: is it running?"
            stack.enter_context(lock_file(lock, seconds=LOCK_SECONDS, holder=holder))
        train, evaluation = open_splits(kind, root, config)

    class_names = names_of_classes(train)
    first = as_split(train, class_names, config)
    other = first if evaluation is train else as_split(evaluation, class_names, config)
    return Datasets(train=first, eval=other, class_names=class_names)


def find_class(name: str) -> type:
    """Return the class `name` of torchvision.datasets; ConfigError if there is none."""
    known = [
        key
        for key in torchvision_datasets.__all__
        if "root" in inspect.signature(getattr(torchvision_datasets, key)).parameters
        and not key.startswith("LSUN")  # which reads a pickle from the current folder
    ]
    require(
        name in known,
        f"data.dataset={name} is not a data set of torchvision{suggestion(name, known)}",
    )
    return getattr(torchvision_datasets, name)


def open_splits(kind: type, root: Path, config: TorchvisionDataConfig) -> tuple[Any, Any]:
    """Return the objects of `kind` for training and evaluation.

    With data.validation_fraction, only the training split is opened, and returned twice.
    ConfigError if there is no split for evaluation.
    """
    first, *others = split_arguments(kind, config)
    train = open_split(kind, root, config, first)
    if config.validation_fraction > 0:
        return train, train
    for other in others:
        try:
            return train, open_split(kind, root, config, other)
        except UnknownSplitError:
            if config.test_split:
                raise
    raise ConfigError(
        f"data.dataset={config.dataset} has no split for evaluation: set"
        " data.validation_fraction=0.2"
    )


def split_arguments(kind: type, config: TorchvisionDataConfig) -> list[dict[str, Any]]:
    """Return the arguments of `kind` for the training split, then for each possible evaluation.

    ConfigError if the config names a split, and the splits of `kind` are not chosen by name.
    """
    known = arguments_of(kind)
    common = dict(config.arguments)
    if "download" in known:
        common["download"] = config.download

    if "split" in known and "train" not in known:
        first = config.train_split or known["split"].default
        others = [config.test_split] if config.test_split else EVALUATION_SPLITS
        return [common | {"split": name} for name in (first, *others)]

    splits = {"train_split": config.train_split, "test_split": config.test_split}
    named = " ".join(f"data.{key}={name}" for key, name in splits.items() if name)
    require(
        not named,
        f"{named}: the splits of data.dataset={config.dataset} are not chosen by name: leave out"
        " the key",
    )
    if "train" not in known:
        return [common]
    return [common | {"train": is_train} for is_train in (True, False)]


def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of `kind` and of its base classes, which it may pass on, by name."""
    known: dict[str, inspect.Parameter] = {}
    for base in reversed(kind.__mro__[:-1]):  # without object
        known |= inspect.signature(base).parameters
    return known


def open_split(
    kind: type, root: Path, config: TorchvisionDataConfig, arguments: dict[str, Any]
) -> Any:
    """Return an object of `kind`; ConfigError if files are missing, or an argument is wrong."""
    name = f"data.dataset={config.dataset}"
    try:
        return kind(str(root), **arguments)
    except ImportError as error:
        raise ConfigError(f"{name} needs {error.name}: pip install {error.name}") from error
    except TypeError as error:
        raise ConfigError(
            f"data.arguments={config.arguments} does not fit {config.dataset}: {error}"
        ) from error
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(str(error).split())[:300]
        if "for argument split" in reason:
            raise UnknownSplitError(f"{name}: {reason}") from error
        fix = "" if config.download else ", or set data.download=true"
        raise ConfigError(
            f"{name} cannot be read from data.root={root} ({reason}): put its files there{fix}"
        ) from error


def names_of_classes(dataset: Any) -> list[str]:
    """Return the names of the classes, or their numbers where the data set has no names."""
    names = getattr(dataset, "classes", None) or list(getattr(dataset, "class_to_idx", ()))
    if not names:
        return [str(number) for number in range(max(labels_of(dataset)) + 1)]
    first = [name if isinstance(name, str) else str(name[0]) for name in names]
    # ImageNet has two classes named crane.
    return [f"{name} ({n})" if first.count(name) > 1 else name for n, name in enumerate(first)]


def as_split(dataset: Any, class_names: list[str], config: TorchvisionDataConfig) -> Split:
    """Return `dataset` as a split: in memory if torchvision has it there, else as image files."""
    labels = labels_of(dataset)
    images = as_images(getattr(dataset, "data", None), count=len(dataset))
    if images is not None and torch.equal(images[0], read_sample(dataset, 0)[0]):
        return ImageTensors(images, torch.tensor(labels))
    files = index_files(paths_of(dataset), labels, class_names, cache_folder(config))
    return image_files(files, class_names, config)


def as_images(data: Any, *, count: int) -> Tensor | None:
    """Return `data` as [N, C, H, W], or None if it is not `count` images.

    data: uint8 [N, H, W], [N, H, W, C] or [N, C, H, W].
    """
    if not isinstance(data, Tensor | np.ndarray) or len(data) != count:
        return None
    images = torch.as_tensor(data)
    if images.dtype != torch.uint8 or images.ndim not in (3, 4):
        return None
    if images.ndim == 3:
        return images[:, None]
    return images.permute(0, 3, 1, 2).contiguous() if images.shape[3] in (1, 3) else images


def labels_of(dataset: Any) -> list[int]:
    """Return the label of each image; ConfigError if there is not one number for each image."""
    samples = attribute(dataset, SAMPLES)
    labels = attribute(dataset, LABELS) if samples is None else [label for _, label in samples]
    try:
        return [int(label) for label in labels]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data.dataset={type(dataset).__name__} does not give one class for each image:"
            f" {USE_A_PLUGIN}"
        ) from error


def paths_of(dataset: Any) -> list[Path]:
    """Return the path of each image; ConfigError if the images are not files."""
    samples = attribute(dataset, SAMPLES)
    paths = attribute(dataset, PATHS) if samples is None else [path for path, _ in samples]
    # FER2013 has pixels in place of paths.
    require(
        paths is not None and isinstance(paths[0], str | Path),
        f"data.dataset={type(dataset).__name__} has its images neither in memory nor in files:"
        f" {USE_A_PLUGIN}",
    )
    return [Path(path) for path in paths or ()]


def attribute(dataset: Any, names: Sequence[str]) -> Any:
    """Return the first of the attributes `names` with a value for each image; None without one."""
    values = (getattr(dataset, name, None) for name in names)
    is_list = (list, tuple, np.ndarray, Tensor)
    count = len(dataset)
    return next((v for v in values if isinstance(v, is_list) and len(v) == count), None)
