"""Read the folders evaluation/<checkpoint>-<split>/ of a run."""

import csv
import heapq
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

from ddp_trainer.scores.cells import from_cell
from ddp_trainer.tools.folder_reader import FolderReader, number, text

MAX_MATRIX_CLASSES = 60
"""With more classes than this, the report lists confused pairs of classes in place of a matrix."""
MAX_PAIRS = 200

ClassRow = tuple[str, list[float | None], float | None]


class EvaluationFolder:
    """The content of one evaluation folder."""

    def __init__(self, folder: FolderReader) -> None:
        self.folder = folder
        self.name = text(folder.folder.name)
        self.metrics: dict[str, Any] = folder.read_object("metrics.json", dict)
        self.class_names, self.matrix = read_matrix(folder)
        self.mistakes = list(read_mistakes(folder))

    def class_scores(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the scores of each class, the lowest F1 first."""
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
        """Return count and shade (0 to 10) of each cell of the matrix; [] for too many classes."""
        # The shade is the root of a cell's share of its row, because small shares must be visible.
        return [
            [(count, math.ceil(10 * math.sqrt(count / (sum(row) or 1)))) for count in row]
            for row in self.matrix
            if len(self.matrix) <= MAX_MATRIX_CLASSES
        ]

    def confused(self) -> list[tuple[int, str, str]]:
        """Return count, true and predicted class of the `MAX_PAIRS` most confused pairs."""
        names = self.class_names
        pairs = (
            (count, names[label], names[prediction])
            for label, row in enumerate(self.matrix)
            for prediction, count in enumerate(row)
            if count and label != prediction
        )
        return heapq.nlargest(MAX_PAIRS, pairs, key=itemgetter(0))


class ClassComparison(NamedTuple):
    """The F1 of each class in evaluations of several runs on the same images.

    columns: the index of each run and the name of its evaluation. rows: the name of a class, its F1
    by column, and its change: the second minus the first of two columns, or the range of more.
    """

    images: str
    columns: list[tuple[int, str]]
    rows: list[ClassRow]


def compare_classes(runs: Sequence[Sequence[EvaluationFolder]]) -> list[ClassComparison]:
    """Return a comparison for each split of which several runs have an evaluation.

    Of several evaluations of a run, the one whose name most runs have is taken, such as best-test.
    """
    num_runs = Counter(evaluation.name for run in runs for evaluation in run)
    splits: dict[str, dict[int, EvaluationFolder]] = {}
    for place, run in enumerate(runs):
        for evaluation in sorted(run, key=lambda one: (-num_runs[one.name], one.name)):
            images = evaluation.name.partition("-")[2]
            splits.setdefault(images, {}).setdefault(place, evaluation)
    return [
        ClassComparison(images, [(place, one.name) for place, one in found.items()], rows_of(found))
        for images, found in splits.items()
        if len(found) > 1
    ]


def rows_of(evaluations: dict[int, EvaluationFolder]) -> list[ClassRow]:
    """Return the rows of a comparison, the most changed class first."""
    columns = [
        {name: number(scores.get("f1")) for name, scores in evaluation.class_scores()}
        for evaluation in evaluations.values()
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    f1 = {name: [column.get(name) for column in columns] for name in names}
    rows = [(name, values, change_of(values)) for name, values in f1.items()]
    return sorted(rows, key=lambda row: abs(row[2] or 0.0), reverse=True)


def change_of(values: Sequence[float | None]) -> float | None:
    """Return the second minus the first of two values, or the range of more; None: unknown."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return known[1] - known[0] if len(values) == 2 else max(known) - min(known)


def read_matrix(folder: FolderReader) -> tuple[list[str], list[list[int]]]:
    """Return class names and rows of confusion_matrix.csv; empty if it is missing or damaged."""
    data = folder.read_bytes("confusion_matrix.csv")
    if data is None:
        return [], []
    reader = csv.reader(io.StringIO(data.decode(errors="surrogateescape"), newline=""))
    with suppress(csv.Error, ValueError):
        head, *lines = filter(None, reader)
        names = [text(from_cell(cell)) for cell in head[1:]]
        rows = [[int(cell) for cell in line[1:]] for line in lines]
        is_square = [len(row) for row in rows] == [len(names)] * len(names)
        if is_square and min(map(min, rows)) >= 0:
            return names, rows
    folder.problems.append("confusion_matrix.csv is damaged.")
    return [], []


def read_mistakes(folder: FolderReader) -> Iterator[dict[Any, Any]]:
    """Yield the entries of mistakes.json. "picture" is a data URI in place of the file name.

    It is None if the picture is missing or not a PNG.
    """
    for entry in folder.read_object("mistakes.json", list):
        if isinstance(entry, dict):
            name = entry.get("picture")
            picture = folder.read_picture(name) if isinstance(name, str) else None
            yield entry | {"picture": picture}


def read_evaluations(folder: FolderReader) -> list[EvaluationFolder]:
    """Return the evaluations of a run, sorted by name.

    Raises:
        TransientError: the file system does not answer.
    """
    folders = []
    try:
        for entry in (folder.folder / "evaluation").iterdir():
            name = f"evaluation/{entry.name}"
            if folder.is_inside(name):
                folders += [entry] if entry.is_dir() else []
            else:
                folder.problems.append(f"{text(name)} is a link out of the folder: left out.")
    except FileNotFoundError:
        return []
    except OSError as error:
        folder.add_unreadable("evaluation", error)
        return []
    # best first, because export and predict use it; evaluations of other images have longer names
    folders.sort(key=lambda path: (not path.name.startswith("best"), len(path.name), path.name))
    return [
        EvaluationFolder(FolderReader(path)) for path in folders if not path.name.startswith(".")
    ]
