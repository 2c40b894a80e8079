"""The files of an evaluation: metrics.json, confusion_matrix.csv and .png, mistakes.json and its
pictures.
"""

import csv
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_trainer.config.errors import path_error
from ddp_trainer.files import lock_file
from ddp_trainer.scores.pictures import confusion_png, thumbnail_png
from ddp_trainer.scores.scores import Scores, ids_of
from ddp_trainer.training.results import CONFIDENCE, ID, LABEL, LOSS, PREDICTION

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
        text = json.dumps(finite(about | scores.values()), indent=1)
        (new / "metrics.json").write_text(text + "\n", encoding="utf-8")
        path = new / "confusion_matrix.csv"
        with open(
            path, "w", encoding="utf-8", errors="surrogateescape", newline=""
        ) as file:  # a class is any folder
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["", *scores.class_names])
            true_classes = zip(scores.class_names, scores.confusion.tolist(), strict=True)
            writer.writerows([name, *counts] for name, counts in true_classes)
        (new / "confusion_matrix.png").write_bytes(
            confusion_png(scores.confusion, scores.class_names)
        )
        (new / "mistakes").mkdir()
        mistakes = []
        for rows in scores.mistakes().split(BATCH):
            for row, pixels in zip(rows.tolist(), read(ids_of(rows)), strict=True):
                mistakes.append(describe(row, scores.class_names, paths))
                (new / mistakes[-1]["picture"]).write_bytes(thumbnail_png(pixels.cpu()))
        (new / "mistakes.json").write_text(json.dumps(mistakes, indent=1) + "\n", encoding="utf-8")


def describe(
    row: list[float], class_names: list[str], paths: Callable[[int], str]
) -> dict[str, Any]:
    """Return the entry of mistakes.json for a sample. row: its row in the result of
    `SampleResults.gather`.
    """
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
    """Return `value` with None for each nan or infinity in it, also in nested dicts and lists: JSON
    has neither.
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` if the ``with`` block succeeds; else `folder` is
    left unchanged.
    """
    new, old = (folder.with_name(f".{folder.name}.{state}") for state in ("writing", "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        holder = (
            f"another process is writing to {folder.parent}: wait for it, and start the same"
            " command again"
        )
        with lock_file(folder.parent / ".lock", seconds=LOCK_SECONDS, holder=holder):
            try:
                # a process was killed between the two renames
                if old.exists() and not folder.exists():
                    old.rename(folder)
                for leftover in (new, old):
                    shutil.rmtree(leftover, ignore_errors=True)
                new.mkdir()
                yield new
                for file in new.rglob("*.*"):
                    with open(file, "rb") as written:
                        os.fsync(written.fileno())
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            finally:
                if old.exists() and not folder.exists():
                    old.rename(folder)
                for leftover in (new, old):
                    shutil.rmtree(leftover, ignore_errors=True)
    except OSError as error:
        raise path_error(error, f"{folder} cannot be written: {error.strerror or error}") from error
