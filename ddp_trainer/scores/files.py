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

from ddp_trainer.config.errors import path_error
from ddp_trainer.files import lock_file
from ddp_trainer.scores.pictures import confusion_png, thumbnail_png
from ddp_trainer.scores.scores import Scores, ids_of
from ddp_trainer.training.evaluation import CONFIDENCE, ID, LABEL, LOSS, PREDICTION

FOLDER = "evaluation"
LOCK_SECONDS = 60.0
BATCH = 64


def write_evaluation(
    folder: Path,
    scores: Scores,
    about: dict[str, Any],
    *,
    paths: Callable[[int], str],
    read: Callable[[Tensor], Tensor],
) -> None:
    """Write the files of an evaluation to `folder`, all of them or none.

    about: further entries of metrics.json. paths: a function of a sample's id that returns its path
    or its name. read: a function of ids, int64 [B], that returns the images of these samples, uint8
    [B, C, H, W].

    Raises:
        ConfigError, TransientError: a file cannot be written; the old files are then as they were.
    """
    with replace_folder(folder) as new:
        write_json(new / "metrics.json", finite(about | scores.values()))
        write_matrix(new / "confusion_matrix.csv", scores)
        picture = confusion_png(scores.confusion, scores.class_names)
        (new / "confusion_matrix.png").write_bytes(picture)
        (new / "mistakes").mkdir()
        mistakes = []
        for rows in scores.mistakes().split(BATCH):
            for row, pixels in zip(rows.tolist(), read(ids_of(rows)), strict=True):
                mistake = describe_mistake(row, scores.class_names, paths)
                (new / mistake["picture"]).write_bytes(thumbnail_png(pixels.cpu()))
                mistakes.append(mistake)
        write_json(new / "mistakes.json", mistakes)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_matrix(path: Path, scores: Scores) -> None:
    """Write the confusion matrix to `path`: class names, then a row for each true class."""
    # surrogateescape, because a class may have the name of any folder
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["", *scores.class_names])
        for name, counts in zip(scores.class_names, scores.confusion.tolist(), strict=True):
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
        "probability": finite(row[CONFIDENCE]),
        "loss": finite(row[LOSS]),
        "picture": f"mistakes/{number:08d}.png",
    }


def finite(value: Any) -> Any:
    """Return `value` with None for each nan or infinity in it, because JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which replaces `folder` if the ``with`` block succeeds."""
    new = folder.with_name(f".{folder.name}.writing")
    old = folder.with_name(f".{folder.name}.old")
    fix = "wait for it, and start the same command again"
    holder = f"another process is writing to {folder.parent}: {fix}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder.parent / ".lock", seconds=LOCK_SECONDS, holder=holder):
            try:
                # a process may have been killed between the two renames below
                restore(folder, new=new, old=old)
                new.mkdir()
                yield new
                for file in new.rglob("*.*"):
                    with open(file, "rb") as written:
                        os.fsync(written.fileno())
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            finally:
                restore(folder, new=new, old=old)
    except OSError as error:
        raise path_error(error, f"{folder} cannot be written: {error.strerror or error}") from error


def restore(folder: Path, *, new: Path, old: Path) -> None:
    """Rename `old` back if `folder` is missing, and delete what is left of `new` and `old`."""
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
