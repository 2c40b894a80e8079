"""The files of an evaluation: scores, confusion matrix, and mistakes with their pictures."""

import csv
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_trainer.config.errors import path_error, require
from ddp_trainer.files import lock_file
from ddp_trainer.scores.cells import to_cell
from ddp_trainer.scores.pictures import confusion_png, thumbnail_png
from ddp_trainer.scores.scores import Scores, ids_of
from ddp_trainer.training.evaluation import CONFIDENCE, ID, LABEL, LOSS, PREDICTION

FOLDER = "evaluation"
METRICS = "metrics.json"
MATRIX = "confusion_matrix.csv"
MATRIX_PICTURE = "confusion_matrix.png"
MISTAKES = "mistakes.json"
MISTAKE_PICTURES = "mistakes"
OWN_NAMES = (METRICS, MATRIX, MATRIX_PICTURE, MISTAKES, MISTAKE_PICTURES)
"""The files and the folder that an evaluation writes."""
LOCK_SECONDS = 60.0
BATCH = 64


def write_evaluation(
    folder: Path,
    scores: Scores,
    about: dict[str, Any],
    *,
    paths: Callable[[int], str],
    read: Callable[[Tensor], Tensor],
    fix: str = "",
) -> None:
    """Write the files of an evaluation to `folder`, all of them or none.

    about: further entries of metrics.json. paths: returns the path or the name of a sample by its
    id. read: returns the images of samples, uint8 [B, C, H, W], by their ids, int64 [B].
    fix: the end of the message of an error.

    Raises:
        ConfigError, TransientError: a file cannot be written; earlier files in `folder` are kept.
    """
    with replace_folder(folder, fix=fix) as new:
        write_json(new / METRICS, about | scores.values())
        write_matrix(new / MATRIX, scores)
        picture = confusion_png(scores.confusion, scores.class_names)
        (new / MATRIX_PICTURE).write_bytes(picture)
        (new / MISTAKE_PICTURES).mkdir()
        mistakes = []
        for rows in scores.mistakes().split(BATCH):
            for row, pixels in zip(rows.tolist(), read(ids_of(rows)), strict=True):
                mistake = describe_mistake(row, scores.class_names, paths)
                (new / mistake["picture"]).write_bytes(thumbnail_png(pixels.cpu()))
                mistakes.append(mistake)
        write_json(new / MISTAKES, mistakes)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON, with null for nan and infinity, which JSON does not have."""
    path.write_text(json.dumps(finite(value), indent=1) + "\n", encoding="utf-8")


def write_matrix(path: Path, scores: Scores) -> None:
    """Write the confusion matrix to `path`: a line of class names, then a line per true class.

    Each name is written as `to_cell` returns it.
    """
    names = list(map(to_cell, scores.class_names))
    # surrogateescape, because a class name may come from a folder whose name is not UTF-8
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["", *names])
        for name, counts in zip(names, scores.confusion.tolist(), strict=True):
            writer.writerow([name, *counts])


def describe_mistake(
    row: list[float], class_names: Sequence[str], paths: Callable[[int], str]
) -> dict[str, Any]:
    """Return an entry of mistakes.json. row: a row of the result of `SampleResults.gather`."""
    number = int(row[ID])
    return {
        "id": number,
        "path": paths(number),
        "label": class_names[int(row[LABEL])],
        "prediction": class_names[int(row[PREDICTION])],
        "probability": row[CONFIDENCE],
        "loss": row[LOSS],
        "picture": f"{MISTAKE_PICTURES}/{number:08d}.png",
    }


def finite(value: Any) -> Any:
    """Return `value` with None for each nan or infinity in it."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def replace_folder(folder: Path, *, fix: str = "") -> Iterator[Path]:
    """Yield an empty folder, which replaces `folder` if the ``with`` block succeeds.

    Files in `folder` that no evaluation writes, for example notes of the user, are kept.

    Raises:
        ConfigError, TransientError: a file cannot be written, or `folder` is a link or a file.
    """
    new = folder.with_name(f".{folder.name}.writing")
    old = folder.with_name(f".{folder.name}.old")
    holder = (
        f"another process is writing to {folder.parent}: wait for it, and start the same command"
        " again"
    )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.parent / ".lock", seconds=LOCK_SECONDS, holder=holder):
            is_folder = not os.path.lexists(folder) or (folder.is_dir() and not folder.is_symlink())
            require(is_folder, f"{folder} is a link or a file: remove it{fix}")
            try:
                # an earlier process may have been killed between the two renames below
                restore(folder, new=new, old=old)
                new.mkdir()
                yield new
                copy_others(folder, new)
                for file in filter(Path.is_file, new.rglob("*")):
                    with open(file, "rb") as written:
                        os.fsync(written.fileno())
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            finally:
                restore(folder, new=new, old=old)
    except OSError as error:
        raise path_error(
            error, f"{folder} cannot be written: {error.strerror or error}{fix}"
        ) from error


def copy_others(folder: Path, new: Path) -> None:
    """Copy the files and folders in `folder` that no evaluation writes to `new`."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.name in OWN_NAMES:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True)
        else:
            shutil.copy2(path, new / path.name, follow_symlinks=False)


def restore(folder: Path, *, new: Path, old: Path) -> None:
    """Rename `old` to `folder` if `folder` is missing; then delete `new` and `old`, if any."""
    for path in (new, old):
        if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
            path.unlink()  # a stranger's link, pipe or file
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
