"""Images that a file lists: a table with a path and a label in each row.

More columns may give the split of each image, and its group, for example its patient.
"""

import errno
import hashlib
import json
import logging
import math
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from ddp_trainer.config.data import ManifestConfig
from ddp_trainer.config.errors import path_error, printable, require
from ddp_trainer.data.dataset import Datasets
from ddp_trainer.data.datasets.tables import Table, read_table
from ddp_trainer.data.images.file_index import (
    SCAN_THREADS,
    Array,
    File,
    FileIndex,
    as_array,
    saved_index,
    stat_file,
)
from ddp_trainer.data.images.image_files import ImageFiles, cache_folder
from ddp_trainer.runtime import disable_gc

logger = logging.getLogger(__name__)

SPLITS = {
    "train": 0,
    "training": 0,
    "val": 1,
    "valid": 1,
    "validation": 1,
    "test": 2,
}
"""The values of the split column, in lower case, and their numbers."""
NAMES = ("train", "validation", "test")
"""The names of the numbers of `SPLITS`."""
CHUNK = 4096
"""How many files a thread looks for at a time."""


def build_manifest(config: ManifestConfig) -> Datasets:
    """Return the images that data.file lists.

    With data.validation_fraction or data.fold, both splits are the training images, and `hold_out`
    divides them.

    Raises:
        ConfigError: the file, a row or an image is missing or wrong; a row is named by its number.
    """
    files = load_manifest(config)
    found = np.unique(files.splits).tolist()
    require(
        0 in found,
        f"{config.file} has no row of the split train: write train into its column"
        f" {config.split_column}",
    )
    train = files.part(files.splits == 0)
    names = train.class_names
    require(
        len(names) > 1, f"{config.file} has only one {config.label_column}, and needs two or more"
    )
    for name, count in zip(names, train.counts.tolist(), strict=True):
        require(
            count > 0,
            f"{config.file} has no training image of the class {name!r}: add some, or remove the"
            " other rows of this class",
        )
    if config.holds_out:
        if 1 in found:
            logger.warning(
                "the validation rows of %s are not used, because %s holds out training images: to"
                " evaluate on the rows, set %s",
                config.file,
                config.hold_out_key,
                config.hold_out_off,
            )
        found = [0]
    else:
        require(
            len(found) > 1,
            f"{config.file} has training images only: set data.validation_fraction=0.2, or add a"
            f" column {config.split_column!r} with train and validation",
        )
    evaluation = files.part(files.splits == found[1]) if len(found) > 1 else train
    return Datasets(
        train=ImageFiles(train, names, config),
        eval=ImageFiles(evaluation, names, config),
        class_names=names,
        eval_split="validation" if 1 in found else "test",
    )


def open_manifest_split(
    config: ManifestConfig, split: str, class_names: list[str], *, may_be_whole: bool
) -> ImageFiles:
    """Return the images of a split.

    may_be_whole: whether a table without splits is returned whole; if not, its images count as
    those of a training.

    Raises:
        ConfigError: there is none, or a row has a class that `class_names` lacks.
    """
    config = replace(config, class_names=class_names)
    files = load_manifest(config)
    if files.splits.any() or not may_be_whole:
        files = files.part(files.splits == SPLITS[split])
    require(len(files) > 0, f"{config.file} has no row of the split {split}")
    return ImageFiles(files, class_names, config)


def load_manifest(config: ManifestConfig) -> FileIndex:
    """Return the index of all images: the saved one if neither the table nor images changed."""
    require(config.file is not None, "data.file is missing: give the table of images, data.file=…")
    file = Path(os.path.expanduser(config.file or ""))
    require(
        os.path.isfile(file), f"data.file={config.file} must be a table of images, and is no file"
    )
    root = file.parent if config.root is None else Path(os.path.expanduser(config.root))
    require(os.path.isdir(root), f"data.root={config.root} must be the folder of the images")
    columns = [
        config.path_column,
        config.label_column,
        config.split_column,
        config.group_column,
        config.weight_column,
    ]
    chosen = [str(file.resolve()), str(root.resolve()), columns, config.class_names]
    name = hashlib.sha256(json.dumps(chosen).encode(errors="surrogateescape")).hexdigest()[:16]
    with disable_gc():  # which would look again and again at the rows of a large table
        return saved_index(
            root,
            cache_folder(config) / f"{name}.index",
            lambda path: read_rows(config, file, root, path),
        )


def read_rows(config: ManifestConfig, file: Path, root: Path, path: Path) -> FileIndex:
    """Return the index of the images in the table `file`. path: the file for the index."""
    # Without links, because the parent of a link to a folder is not where the link is.
    name = os.path.relpath(os.path.realpath(file), os.path.realpath(root))
    # Before it is read, so that a change meanwhile is noticed by the next launch.
    own = as_array([stat_file(os.fsencode(root), os.fsencode(name))])
    return index_rows(config, read_table(file), root, saved_in=path, folders=own)


def index_rows(
    config: ManifestConfig, table: Table, root: Path, *, saved_in: Path, folders: Array
) -> FileIndex:
    """Return the index of the images in `table`, sorted by class and path.

    saved_in, folders: see `FileIndex`.
    """
    paths = required_column(table, config.path_column, key="path_column")
    labels = required_column(table, config.label_column, key="label_column")
    splits = splits_of(table, config.split_column)
    class_names = config.class_names or sorted(set(labels))
    number = {name: place for place, name in enumerate(class_names)}
    repeated = [name for place, name in enumerate(class_names) if number[name] != place]
    require(
        not repeated,
        f"data.class_names has the name {printable(', '.join(repeated[:1]))!r} twice: remove one",
    )
    table.require(
        [label in number for label in labels],
        lambda index: (
            f"has the class {labels[index]!r}, which is not among"
            f" {printable(', '.join(class_names))[:200]}"
        ),
    )
    check_unique(table, paths, root)
    groups = groups_of(table, config.group_column, splits)
    weights = weights_of(table, config.weight_column)
    names = list(map(os.fsencode, paths))
    numbers = np.array([number[label] for label in labels], np.int64)
    order = np.lexsort((np.array(names), numbers))
    top = os.fsencode(root)
    files = list(stat_rows(top, table, [(index, names[index]) for index in order.tolist()]))
    return FileIndex(
        root=root,
        saved_in=saved_in,
        class_names=list(class_names),
        counts=np.bincount(numbers, minlength=len(class_names)),
        files=as_array(files),
        folders=folders,
        splits=splits[order],
        groups=groups[order] if len(groups) else groups,
        weights=weights[order] if len(weights) else weights,
    )


def required_column(table: Table, name: str, *, key: str) -> list[str]:
    """Return the column `name`, which has no empty value. key: the setting with the name."""
    require(
        name in table.names,
        f"{table.file} has no column {name!r}: set data.{key} to one of"
        f" {printable(', '.join(table.names))[:200]}",
    )
    values = table.column(name)
    table.require(
        [bool(value) and "\0" not in value for value in values],
        lambda _: f"has no {name}: fill it in, or remove the row",
    )
    table.require(
        list(map(is_text, values)),
        lambda index: f"has the {name} {printable(values[index])[:200]}, which is no Unicode text",
    )
    return values


def is_text(value: str) -> bool:
    """Return whether a file can have the name `value`; JSON may have halves of surrogate pairs."""
    try:
        return value.isascii() or bool(os.fsencode(value))
    except UnicodeEncodeError:
        return False


def splits_of(table: Table, name: str | None) -> Array:
    """Return the number of each row's split, int64 [N]; all are 0 without the column."""
    if name not in table.names:
        return np.zeros(len(table.rows), np.int64)
    values = [value.lower() for value in table.column(name)]
    table.require(
        [value in SPLITS for value in values],
        lambda index: f"has the {name} {values[index]!r}, which must be one of {', '.join(SPLITS)}",
    )
    return np.array([SPLITS[value] for value in values], np.int64)


def groups_of(table: Table, name: str | None, splits: Array) -> Array:
    """Return the number of each row's group, by name, int64 [N]; an empty array without the column.

    Raises:
        ConfigError: a group is in two splits.
    """
    if name not in table.names:
        return np.zeros(0, np.int64)
    values = required_column(table, name, key="group_column")
    first: dict[str, int] = {}
    for index, value in enumerate(values):
        first.setdefault(value, index)
    table.require(
        [splits[first[value]] == split for value, split in zip(values, splits, strict=True)],
        lambda index: (
            f"puts the {name} {values[index]!r} into {NAMES[splits[index]]}, and row"
            f" {table.numbers[first[values[index]]]} into {NAMES[splits[first[values[index]]]]}: an"
            " evaluation would know it from the training; move one, or set data.group_column=null"
        ),
    )
    number = {value: place for place, value in enumerate(sorted(first))}
    return np.array([number[value] for value in values], np.int64)


def weights_of(table: Table, name: str | None) -> Array:
    """Return the weight of each row, float64 [N]; an empty array without the column."""
    if name not in table.names:
        return np.zeros(0)
    texts = table.column(name)
    table.require(
        [is_weight(text) for text in texts],
        lambda index: f"has the {name} {texts[index]!r}, which must be a number of 0 or more",
    )
    return np.array(list(map(float, texts)))


def is_weight(text: str) -> bool:
    """Return whether `text` is a finite number of 0 or more."""
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def check_unique(table: Table, paths: Sequence[str], root: Path) -> None:
    """Check that no image is listed twice, also not by two forms of its path; else ConfigError."""
    top = os.path.abspath(root)
    # A third slash at the begin, because normpath keeps two.
    full = [
        os.path.normpath(f"//{path}" if path.startswith("/") else f"//{top}/{path}")
        for path in paths
    ]
    if len(set(full)) == len(full):
        return
    first: dict[str, int] = {}
    table.require(
        [first.setdefault(path, index) == index for index, path in enumerate(full)],
        lambda index: (
            f"lists {printable(paths[index])}, as row"
            f" {table.numbers[first[full[index]]]} does: keep one of them"
        ),
    )


def stat_rows(root: bytes, table: Table, rows: list[tuple[int, bytes]]) -> Iterator[File]:
    """Yield the name, size and time of each image. rows: the place in the table, and the path.

    Raises:
        ConfigError: an image is missing, or is no file.
    """

    def look(part: list[tuple[int, bytes]]) -> list[File]:
        found = []
        for index, name in part:
            try:
                status = os.stat(os.path.join(root, name))
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EISDIR, "it is no file")
                found.append((name, status.st_size, status.st_mtime_ns))
            except OSError as error:
                reason = (
                    f"lists {printable(os.fsdecode(name))[:200]}, which cannot be read in"
                    f" {os.fsdecode(root)} ({error.strerror}): correct the path, or set data.root"
                )
                raise path_error(error, str(table.error(index, reason))) from error
        return found

    parts = [rows[begin : begin + CHUNK] for begin in range(0, len(rows), CHUNK)]
    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        yield from chain.from_iterable(pool.map(look, parts))
