"""Read the folders evaluation/<checkpoint>-<split>/ of a run."""

import csv
import heapq
import io
import math
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ddp_trainer.tools.report.files import FolderReader, Picture
from ddp_trainer.tools.report.values import number, text

MAX_MATRIX_CLASSES = 60
"""With more classes than this, the page lists the most confused pairs of classes instead."""
MAX_PAIRS = 200


@dataclass(frozen=True, slots=True)
class Mistake:
    """A misclassified sample: an entry of mistakes.json."""

    path: str
    label: str
    prediction: str
    probability: float | None
    loss: float | None
    picture: Picture | None


class EvaluationFolder:
    """The content of one evaluation folder."""

    def __init__(self, folder: FolderReader) -> None:
        self.folder = folder
        self.name = text(folder.folder.name)
        self.metrics: dict[str, Any] = folder.read_object("metrics.json", dict)
        self.class_names, self.matrix = read_matrix(folder)
        self.mistakes = read_mistakes(folder)

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no scores, no confusion matrix and no mistakes."""
        return not (self.metrics or self.matrix or self.mistakes)

    def class_scores(self) -> list[tuple[str, dict[str, Any]]]:
        """Return class and scores of each class, the lowest F1 first."""
        classes = self.metrics.get("per_class")
        items = classes.items() if isinstance(classes, dict) else []
        rows = [(text(name), scores) for name, scores in items if isinstance(scores, dict)]
        return sorted(rows, key=lambda row: number(row[1].get("f1")) or 0.0)

    def calibration(self) -> list[list[float]]:
        """Return mean confidence, accuracy and count of each bin; 0 for an unknown value."""
        bins = self.metrics.get("calibration")
        return [
            [number(part.get(key)) or 0.0 for key in ("confidence", "accuracy", "count")]
            for part in (bins if isinstance(bins, list) else [])
            if isinstance(part, dict)
        ]

    def cells(self) -> list[list[tuple[int, int]]]:
        """Return count and shade, 0 to 10, of the cells of the matrix; [] for many classes."""
        # the root makes small shares visible
        return [
            [(count, math.ceil(10 * math.sqrt(count / (sum(row) or 1)))) for count in row]
            for row in self.matrix
            if len(self.matrix) <= MAX_MATRIX_CLASSES
        ]

    def confused(self) -> list[tuple[int, str, str]]:
        """Return count, true and predicted class of the most frequent mistakes."""
        names = self.class_names
        pairs = (
            (count, names[label], names[prediction])
            for label, row in enumerate(self.matrix)
            for prediction, count in enumerate(row)
            if count and label != prediction
        )
        return heapq.nlargest(MAX_PAIRS, pairs, key=itemgetter(0))


def read_matrix(folder: FolderReader) -> tuple[list[str], list[list[int]]]:
    """Return class names and rows of confusion_matrix.csv; empty if it is missing or damaged."""
    data = folder.read_bytes("confusion_matrix.csv")
    if data is None:
        return [], []
    reader = csv.reader(io.StringIO(data.decode(errors="surrogateescape"), newline=""))
    with suppress(csv.Error, ValueError):
        head, *lines = filter(None, reader)
        names = [text(name) for name in head[1:]]
        rows = [[int(cell) for cell in line[1:]] for line in lines]
        is_square = [len(row) for row in rows] == [len(names)] * len(names)
        if is_square and min(map(min, rows)) >= 0:
            return names, rows
    folder.problems.append("confusion_matrix.csv is damaged.")
    return [], []


def read_mistakes(folder: FolderReader) -> list[Mistake]:
    """Return the entries of mistakes.json with their pictures."""
    entries = folder.read_object("mistakes.json", list)
    return [read_mistake(entry, folder) for entry in entries if isinstance(entry, dict)]


def read_mistake(entry: dict[Any, Any], folder: FolderReader) -> Mistake:
    """Return an entry of mistakes.json, with its picture."""
    name = entry.get("picture")
    return Mistake(
        path=text(entry.get("path", entry.get("id"))),
        label=text(entry.get("label")),
        prediction=text(entry.get("prediction")),
        probability=number(entry.get("probability")),
        loss=number(entry.get("loss")),
        picture=folder.read_picture(name) if isinstance(name, str) else None,
    )


def read_evaluations(folder: FolderReader) -> list[EvaluationFolder]:
    """Return the evaluations of a run by name.

    Raises:
        TransientError: the file system does not answer.
    """
    path = folder.folder / "evaluation"
    try:
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        folder.add_unreadable("evaluation", error)
        return []
    return [
        EvaluationFolder(FolderReader(path)) for path in folders if not path.name.startswith(".")
    ]
