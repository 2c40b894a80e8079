"""The classification data sets of torchvision, chosen by the name of their Python class."""

import inspect
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets as torchvision_datasets

from ddp_trainer.config.data import TorchvisionDataConfig
from ddp_trainer.config.errors import ConfigError, one_line, require, suggestion
from ddp_trainer.data.dataset import Datasets, ImageTensors, Split, read_sample
from ddp_trainer.data.images.file_index import index_files
from ddp_trainer.data.images.image_files import ImageFiles
from ddp_trainer.distributed.environment import user_cache
from ddp_trainer.files import lock_file

LOCK_SECONDS = 3600.0
"""How long a rank waits for another rank that downloads."""
VALIDATION_SPLITS = ("val", "valid", "validation")
EVALUATION_SPLITS = ("test", *VALIDATION_SPLITS)
"""Possible values of the argument `split` for evaluation, in the order in which they are tried."""
SAMPLES = ("samples", "_samples")
"""Attributes of torchvision's data sets with (path, label) of each image."""
PATHS = (*SAMPLES, "_image_files", "_images")
"""Attributes with the path of each image."""
LABELS = (*SAMPLES, "targets", "_labels", "labels")
"""Attributes with the label of each image."""
USE_A_PLUGIN = "it is not supported; write a plug-in (docs/extending.md)"


class UnknownSplitError(ConfigError):
    """A data set of torchvision has no split of the requested name."""


def build_torchvision_set(config: TorchvisionDataConfig) -> Datasets:
    """Return torchvision's data set `config.dataset`: in memory if possible, else as image files.

    Raises ConfigError if torchvision has no such data set, its files are not in data.root, or it
    does not give one class for each image; TransientError if another process downloads too long.
    """
    kind = find_class(config.dataset)
    root = Path(os.path.expanduser(config.root)) if config.root else user_cache() / "torchvision"
    if config.download:
        with suppress(OSError):  # because torchvision reports a folder that it cannot write
            root.mkdir(parents=True, exist_ok=True)
    holder = f"another process has been downloading to {root} for an hour: end it if it hangs"
    lock = lock_file(root / ".download.lock", seconds=LOCK_SECONDS, holder=holder)
    # Lock also without a download, because the class ImageNet extracts archives into `root`.
    with lock if os.access(root, os.W_OK) else nullcontext():
        opened, eval_split = open_splits(kind, root, config)

    class_names = names_of_classes(opened[0])
    splits = [as_split(dataset, class_names, config) for dataset in opened]
    return Datasets(
        train=splits[0], eval=splits[-1], class_names=class_names, eval_split=eval_split
    )


def find_class(name: str) -> type:
    """Return the class `name` of torchvision.datasets; ConfigError if there is none."""
    known = [
        key
        for key in torchvision_datasets.__all__
        if "root" in inspect.signature(getattr(torchvision_datasets, key)).parameters
        and not key.startswith("LSUN")  # because it loads a pickle from the current folder
    ]
    require(
        name in known,
        f"data.dataset={name} is not a data set of torchvision{suggestion(name, known)}",
    )
    return getattr(torchvision_datasets, name)


def open_splits(kind: type, root: Path, config: TorchvisionDataConfig) -> tuple[list[Any], str]:
    """Return objects of the class `kind` for training and evaluation, and the second one's name.

    The name is "validation" or "test". With data.validation_fraction, the list has only the
    training split. Raises ConfigError if a split cannot be read, or if there is no split for
    evaluation.
    """
    first, *others = split_arguments(kind, config)
    train = open_split(kind, root, config, first)
    if config.holds_out:
        return [train], "validation"
    for other in others:
        try:
            splits = [train, open_split(kind, root, config, other)]
            is_validation = other.get("split") in VALIDATION_SPLITS
            return splits, "validation" if is_validation else "test"
        except UnknownSplitError:
            if config.test_split:
                raise
    raise ConfigError(
        f"data.dataset={config.dataset} has no split for evaluation: set"
        " data.validation_fraction=0.2"
    )


def split_arguments(kind: type, config: TorchvisionDataConfig) -> list[dict[str, Any]]:
    """Return arguments of `kind` for the training split and for each possible evaluation split.

    Raises ConfigError if the config names a split, but `kind` has no argument ``split``.
    """
    known = arguments_of(kind)
    splits: list[dict[str, Any]] = [{}]
    if "train" in known:
        splits = [{"train": True}, {"train": False}]
    elif "split" in known:
        first = config.train_split or known["split"].default
        others = [config.test_split] if config.test_split else EVALUATION_SPLITS
        splits = [{"split": name} for name in (first, *others)]
    require(
        "split" in splits[0] or not (config.train_split or config.test_split),
        f"data.train_split={config.train_split} and data.test_split={config.test_split} must be"
        f" null: the splits of data.dataset={config.dataset} are not chosen by name",
    )
    download = {"download": config.download} if "download" in known else {}
    return [config.arguments | download | split for split in splits]


def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of `kind`, and of its bases, to which it may pass ``**kwargs``."""
    return {
        name: parameter
        for base in reversed(kind.__mro__[:-1])  # without object
        for name, parameter in inspect.signature(base).parameters.items()
    }


def open_split(
    kind: type, root: Path, config: TorchvisionDataConfig, arguments: dict[str, Any]
) -> Any:
    """Return an object of the class `kind`; UnknownSplitError if `kind` has no such split.

    Raises ConfigError if a file or package is missing, a file is damaged, or an argument is wrong.
    """
    name = f"data.dataset={config.dataset}"
    try:
        inspect.signature(kind).bind(str(root), **arguments)
    except TypeError as error:
        raise ConfigError(
            f"data.arguments={config.arguments} does not fit {config.dataset}: {error}"
        ) from error
    try:
        return kind(str(root), **arguments)
    except ImportError as error:
        raise ConfigError(f"{name} needs {error.name}: pip install {error.name}") from error
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be opened with data.arguments={config.arguments} ({one_line(error)}):"
            f" check the arguments and the files in data.root={root}"
        ) from error
    except Exception as error:  # a damaged file may raise anything
        reason = one_line(error)
        if "for argument split" in reason:
            raise UnknownSplitError(f"{name}: {reason}") from error
        fix = "make the download possible" if config.download else "set data.download=true"
        raise ConfigError(
            f"{name} cannot be read from data.root={root} ({reason}): put its files there, or {fix}"
        ) from error


def names_of_classes(dataset: Any) -> list[str]:
    """Return the names of the image classes, or their numbers if the data set has no names."""
    names = getattr(dataset, "classes", None)
    if not names:
        return [str(number) for number in range(max(labels_of(dataset)) + 1)]
    first = [name if isinstance(name, str) else str(name[0]) for name in names]
    # A repeated name gets its class number, because ImageNet has two classes named crane.
    return [f"{name} ({n})" if first.count(name) > 1 else name for n, name in enumerate(first)]


def as_split(dataset: Any, class_names: list[str], config: TorchvisionDataConfig) -> Split:
    """Return `dataset` as a split: in memory if torchvision has read it, else as image files."""
    labels = labels_of(dataset)
    images = images_in_memory(dataset)
    if images is not None:
        return ImageTensors(images, torch.tensor(labels), center_crop=1)
    files = index_files(paths_of(dataset), labels, class_names)
    return ImageFiles(files, class_names, config)


def images_in_memory(dataset: Any) -> Tensor | None:
    """Return the images in the attribute ``data``, [N, C, H, W]; None if it has other content.

    In ``data``, torchvision has uint8 [N, H, W], [N, H, W, C] or [N, C, H, W]. The first image of
    the result is compared with the first sample.
    """
    data = getattr(dataset, "data", None)
    if getattr(data, "ndim", 0) not in (3, 4):
        return None
    images = torch.as_tensor(data)
    if images.ndim == 3:
        images = images[:, None]
    elif images.shape[3] in (1, 3):
        images = images.permute(0, 3, 1, 2).contiguous()
    return images if torch.equal(images[0], read_sample(dataset, 0)[0]) else None


def labels_of(dataset: Any) -> list[int]:
    """Return the label of each image; ConfigError if there is not one number for each image."""
    labels = attribute(dataset, LABELS, column=1)
    try:
        return [int(label) for label in labels]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data.dataset={type(dataset).__name__} does not give one class for each image:"
            f" {USE_A_PLUGIN}"
        ) from error


def paths_of(dataset: Any) -> list[Path]:
    """Return the path of each image; ConfigError if the images are not files."""
    paths = attribute(dataset, PATHS, column=0)
    # FER2013 has pixels in place of paths in `_samples`.
    require(
        paths is not None and isinstance(paths[0], str | Path),
        f"data.dataset={type(dataset).__name__} has its images neither in memory nor in files:"
        f" {USE_A_PLUGIN}",
    )
    return [Path(path) for path in paths or ()]


def attribute(dataset: Any, names: Sequence[str], *, column: int) -> Any:
    """Return the first attribute in `names` that has one value for each image; None if none has.

    column: the index of the value in a pair, for the attributes in `SAMPLES`.
    """
    for name in names:
        values = getattr(dataset, name, None)
        is_list = isinstance(values, list | tuple | np.ndarray | Tensor)
        if is_list and len(values) == len(dataset):
            return [item[column] for item in values] if name in SAMPLES else values
    return None
