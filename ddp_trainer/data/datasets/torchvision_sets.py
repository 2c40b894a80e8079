"""The classification data sets of torchvision, by class name: in memory if torchvision holds them
so, else files.
"""

import inspect
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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
FILE_LISTS = ("samples", "_samples", "imgs")
"""Attributes of torchvision's data sets that may list the (path, label) of each image."""
USE_A_PLUGIN = "it is not supported; write a plug-in (docs/extending.md)"
PATHS = ("_image_files", "_images")
LABELS = ("targets", "_labels", "labels")
"""Names of attributes with the paths, and of attributes with the labels."""


def build_torchvision_set(config: TorchvisionDataConfig) -> Datasets:
    """Return torchvision's data set `config.dataset`.

    Raises ConfigError if there is no such data set, it is not in data.root, or its samples are not
    images with a class.
    """
    kind = find_class(config.dataset)
    root = Path(config.root).expanduser() if config.root else user_cache() / "torchvision"
    if config.download:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"data.root={root} must be a folder that can be written: {error.strerror}"
            raise ConfigError(reason) from error
    with ExitStack() as stack:
        # also without a download, because ImageNet extracts its archives
        if os.access(root, os.W_OK):
            holder = (
                f"another process has been downloading to {root} for {LOCK_SECONDS:.0f} s: is it"
                " still running?"
            )
            stack.enter_context(
                lock_file(root / ".download.lock", seconds=LOCK_SECONDS, holder=holder)
            )
        train, evaluation = open_splits(kind, root, config)
    class_names = names_of_classes(train)
    fix = "set data.validation_fraction=0.2"
    require(
        evaluation is not None, f"data.dataset={config.dataset} has no split for evaluation: {fix}"
    )
    first = as_split(train, class_names, config)
    other = first if evaluation is train else as_split(evaluation, class_names, config)
    return Datasets(train=first, eval=other, class_names=class_names)


def find_class(name: str) -> type:
    """Return the class `name` of torchvision.datasets; ConfigError, with suggestions, if there is
    none.
    """
    classes = [
        key
        for key in torchvision_datasets.__all__
        if isinstance(getattr(torchvision_datasets, key), type)
    ]
    files = [
        key
        for key in classes
        if "root" in inspect.signature(getattr(torchvision_datasets, key)).parameters
    ]
    # LSUN reads a pickle from the current folder
    known = [key for key in files if not key.startswith("LSUN")]
    require(
        name in known,
        f"data.dataset={name} is not a data set of torchvision{suggestion(name, known)}",
    )
    return getattr(torchvision_datasets, name)


def open_splits(kind: type, root: Path, config: TorchvisionDataConfig) -> tuple[Any, Any]:
    """Return the objects of `kind` for training and evaluation; the second is None if there is no
    such split.

    With data.validation_fraction, only the training split is opened, and returned twice.
    ConfigError if the config names a split, and the splits of `kind` are not chosen by name.
    """
    known = {
        name
        for base in kind.__mro__
        for name in inspect.signature(base).parameters
        if base is not object
    }
    named = [
        f"data.{key}={name}"
        for key in ("train_split", "test_split")
        if (name := getattr(config, key))
    ]
    require(
        not named or ("split" in known and "train" not in known),
        f"{' '.join(named)}: the splits of data.dataset={config.dataset} are not chosen by name:"
        " leave out the key",
    )
    options: dict[str, Any] = dict(config.arguments)
    if "download" in known:
        options["download"] = config.download
    if "train" in known:
        first = {"train": True}
        others = [{"train": False}]
    elif "split" in known:
        first = {"split": config.train_split or inspect.signature(kind).parameters["split"].default}
        others = [
            {"split": name}
            for name in ((config.test_split,) if config.test_split else EVALUATION_SPLITS)
        ]
    else:
        first = {}
        others = []
    train = open_split(kind, root, config, options | first)
    if config.validation_fraction > 0:
        return train, train
    for other in others:
        try:
            return train, open_split(kind, root, config, options | other)
        except UnknownSplitError:
            if config.test_split:
                raise
    return train, None


class UnknownSplitError(ConfigError):
    """The class of torchvision has no split of that name."""


def open_split(
    kind: type, root: Path, config: TorchvisionDataConfig, options: dict[str, Any]
) -> Any:
    """Return an object of `kind`; ConfigError if its files are missing or damaged, or an argument
    is wrong.
    """
    try:
        return kind(str(root), **options)
    except ImportError as error:
        raise ConfigError(
            f"data.dataset={config.dataset} needs {error.name}: pip install {error.name}"
        ) from error
    except TypeError as error:
        raise ConfigError(
            f"data.arguments={config.arguments} does not fit {config.dataset}: {error}"
        ) from error
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(str(error).split())[:300]
        if "for argument split" in reason:
            raise UnknownSplitError(f"data.dataset={config.dataset}: {reason}") from error
        fix = (
            "put its files there"
            if config.download
            else "put its files there, or set data.download=true"
        )
        raise ConfigError(
            f"data.dataset={config.dataset} cannot be read from data.root={root} ({reason}): {fix}"
        ) from error


def names_of_classes(dataset: Any) -> list[str]:
    """Return the names of the classes, or their numbers where the data set has no names."""
    names = getattr(dataset, "classes", None) or list(getattr(dataset, "class_to_idx", ()))
    if names:
        first = [name if isinstance(name, str) else str(name[0]) for name in names]
        # ImageNet
        return [f"{name} ({n})" if first.count(name) > 1 else name for n, name in enumerate(first)]
    return [str(number) for number in range(max(labels_of(dataset)) + 1)]


def labels_of(dataset: Any) -> list[int]:
    """Return the label of each image; ConfigError if the data set does not give one number for each
    image.
    """
    lists = [[label for _, label in getattr(dataset, name, None) or ()] for name in FILE_LISTS]
    with suppress(TypeError, ValueError):
        for labels in (*lists, *(getattr(dataset, name, None) for name in LABELS)):
            if labels is not None and len(labels) == len(dataset):
                return [int(label) for label in labels]
    raise ConfigError(
        f"data.dataset={type(dataset).__name__} does not give one class for each image:"
        f" {USE_A_PLUGIN}"
    )


def as_split(dataset: Any, class_names: list[str], config: TorchvisionDataConfig) -> Split:
    """Return the split of `dataset`: in memory if the data set has its images in memory, else as
    image files.
    """
    images = as_images(getattr(dataset, "data", None), count=len(dataset))
    if images is not None and torch.equal(images[0], read_sample(dataset, 0)[0]):
        return ImageTensors(images, torch.tensor(labels_of(dataset)))
    paths, labels = files_of(dataset)
    return image_files(
        index_files(paths, labels, class_names, cache_folder(config)), class_names, config
    )


def as_images(data: Any, *, count: int) -> Tensor | None:
    """Return `data` as [N, C, H, W]; None if it is not uint8 [N, H, W], [N, H, W, C] or [N, C, H,
    W], N = `count`.
    """
    if not isinstance(data, Tensor | np.ndarray) or len(data) != count:
        return None
    images = torch.as_tensor(data)
    if images.dtype != torch.uint8 or images.ndim not in (3, 4):
        return None
    if images.ndim == 3:
        return images[:, None]
    return images.permute(0, 3, 1, 2).contiguous() if images.shape[3] in (1, 3) else images


def files_of(dataset: Any) -> tuple[Sequence[Path], list[int]]:
    """Return the paths and the labels of all images; ConfigError if the images are not files."""
    for name in FILE_LISTS:
        samples = getattr(dataset, name, None)
        # FER2013 has pixels in place of paths
        if samples and isinstance(samples[0][0], str | Path):
            return [Path(path) for path, _ in samples], labels_of(dataset)
    for name in PATHS:
        if paths := getattr(dataset, name, None):
            return [Path(path) for path in paths], labels_of(dataset)
    raise ConfigError(
        f"data.dataset={type(dataset).__name__} has its images neither in memory nor in files:"
        f" {USE_A_PLUGIN}"
    )
