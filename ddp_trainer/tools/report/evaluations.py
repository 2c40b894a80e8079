"""Read the folders evaluation/<checkpoint>-<split>/ of a run, and prepare them for the
report page.
"""

import csv
import heapq
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_trainer.tools.report.curves import rounded
from ddp_trainer.tools.report.files import MB, RunFiles, number, text, whole

MAX_EVALUATIONS = 20
"""Maximum number of evaluation folders of a run that are read."""
MAX_MATRIX_CLASSES = 60
"""If there are more classes than this, the page lists the most confused pairs of classes, without a
matrix.
"""
MAX_PAIRS = 200
MAX_CLASSES = 2_000
MAX_MISTAKES = 1_200
"""Maximum number of pairs of classes, of classes, and of mistakes that the page has for an
evaluation.
"""
MAX_THUMBNAILS = 400
MAX_THUMBNAIL_BYTES = MB // 4
MAX_THUMBNAIL_SIDE = 512
"""Maximum number of thumbnails in a report; maximum bytes of a thumbnail, and maximum pixels of its
sides.
"""

Reference = int | str
"""A class: its index in the page's list of class names, or its name."""


@dataclass(slots=True)
class Matrix:
    """A confusion matrix: all counts, if there are few classes, and a list of the most frequent
    confusions.
    """

    names: list[str] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    """A row of counts for each true class; no rows if there are more than `MAX_MATRIX_CLASSES`
    classes.
    """
    confused: list[tuple[int, int, int]] = field(default_factory=list)
    """Count, and the indices of true and predicted class, of up to `MAX_PAIRS` wrong cells, the
    highest count first.
    """


@dataclass(frozen=True, slots=True)
class Mistake:
    """A misclassified sample: an entry of mistakes.json."""

    path: str
    label: Reference
    prediction: Reference
    probability: float | None
    loss: float | None
    picture: str | None
    """The path of its picture, as mistakes.json has it; this file may be missing. None: no path."""


class Evaluation:
    """One evaluation folder: its scores, its confusion matrix and its mistakes, those with the
    largest loss first.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.pictures = RunFiles(files.folder)
        self.metrics: dict[str, Any] = files.read_object("metrics.json", dict)
        self.matrix = read_matrix(files)
        per_class = self.metrics.get("per_class")
        self.per_class: dict[str, Any] = per_class if isinstance(per_class, dict) else {}
        self.class_names = self.matrix.names or list(self.per_class)
        self.places = {
            name: place for place, name in reversed(list(enumerate(self.class_names[:MAX_CLASSES])))
        }
        entries = [
            entry for entry in files.read_object("mistakes.json", list) if isinstance(entry, dict)
        ]
        self.mistakes = sorted(map(self.mistake, entries), key=lambda mistake: -(mistake.loss or 0))

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no scores, no confusion matrix and no mistakes to show."""
        return not (self.metrics or self.matrix.names or self.mistakes)

    def reference(self, value: object) -> Reference:
        """Return the class `value` (its index or name) as its index in the page's `classes`, else
        its name.
        """
        place = whole(value)
        name = (
            self.class_names[place]
            if place is not None and place < len(self.class_names)
            else value
        )
        return self.places.get(name, text(name)) if isinstance(name, str) else text(name)

    def mistake(self, entry: dict[Any, Any]) -> Mistake:
        """Return an entry of mistakes.json as a `Mistake`; a value of a wrong type becomes None or
        text.
        """
        name = entry.get("path")
        picture = entry.get("picture")
        return Mistake(
            path=text(name if name is not None else entry.get("id")),
            label=self.reference(entry.get("label")),
            prediction=self.reference(entry.get("prediction")),
            probability=number(entry.get("probability")),
            loss=number(entry.get("loss")),
            picture=picture if isinstance(picture, str) else None,
        )

    def encode(self, *, max_thumbnails: int) -> dict[str, Any]:
        """Return this evaluation as JSON values for the page, with pictures of at most
        `max_thumbnails` mistakes.
        """
        shown = [self.mistakes[place] for place in choose(self.mistakes, MAX_MISTAKES)]
        pictured = set(choose(shown, max_thumbnails))
        mistakes = [
            self.encode_mistake(mistake, place in pictured) for place, mistake in enumerate(shown)
        ]
        if self.pictures.problems:
            self.files.problems.append(
                f"pictures of mistakes that cannot be used: {len(self.pictures.problems)}."
            )
        names = ("step", "epoch", "loss", "top1", "top5", "count", "calibration_error")
        return {
            **{name: text(self.metrics.get(name)) for name in ("checkpoint", "split")},
            "data": data_source(self.metrics.get("data")),
            **{name: optional(self.metrics.get(name)) for name in names},
            "classes": [text(name) for name in self.class_names[:MAX_CLASSES]],
            "numClasses": len(self.class_names),
            "matrix": self.matrix.rows,
            "pairs": [
                [self.reference(row), self.reference(column), count]
                for count, row, column in self.matrix.confused
            ],
            "perClass": self.encode_classes(),
            "calibration": encode_calibration(self.metrics.get("calibration")),
            "numMistakes": len(self.mistakes),
            "mistakes": mistakes,
        }

    def encode_classes(self) -> list[list[Any]]:
        """Return [class, precision, recall, F1, support] of all classes, or of the `MAX_CLASSES`
        with the lowest F1.
        """
        rows = []
        for name, scores in self.per_class.items():
            values = scores if isinstance(scores, dict) else {}
            row = [optional(values.get(key)) for key in ("precision", "recall", "f1", "support")]
            rows.append([self.reference(name), *row])
        return (
            rows
            if len(rows) <= MAX_CLASSES
            else sorted(rows, key=lambda row: row[3] or 0)[:MAX_CLASSES]
        )

    def encode_mistake(self, mistake: Mistake, with_picture: bool) -> list[Any]:
        """Return [path, true class, predicted class, its probability, loss, picture: [width,
        height, uri] or None].
        """
        name = mistake.picture
        picture = None
        if with_picture and name and self.pictures.holds(name):
            picture = self.pictures.read_picture(
                name, limit=MAX_THUMBNAIL_BYTES, max_side=MAX_THUMBNAIL_SIDE
            )
        values = (optional(mistake.probability), optional(mistake.loss))
        return [mistake.path, mistake.label, mistake.prediction, *values, picture and [*picture]]


def read_matrix(files: RunFiles) -> Matrix:
    """Return the matrix in confusion_matrix.csv; an empty `Matrix` if the file is missing or
    damaged.
    """
    lines = (
        line.replace("\0", "\ufffd")
        for line in files.read_lines("confusion_matrix.csv", limit=256 * MB)
    )
    matrix = Matrix()
    confused = []
    num_rows = 0
    try:
        reader = csv.reader(lines)
        header = next(reader, None)
        if header is None:
            return matrix
        names = header[1:]
        for place, row in enumerate(filter(None, reader)):
            counts = [int(cell) for cell in row[1:]]
            num_rows = num_rows + 1
            if len(counts) != len(names) or min(counts) < 0 or max(counts) >= 2**53:
                raise ValueError("a row of another length, or a count that is not possible")
            if len(names) <= MAX_MATRIX_CLASSES:
                matrix.rows.append(counts)
            confused += [
                (count, place, column)
                for column, count in enumerate(counts)
                if count and column != place
            ]
            confused = heapq.nsmallest(MAX_PAIRS, confused, key=lambda cell: (-cell[0], *cell[1:]))
        if names and num_rows == len(names):
            matrix.names = names
            matrix.confused = confused
            return matrix
    except (csv.Error, ValueError):
        pass
    files.problems.append("confusion_matrix.csv is damaged.")
    return Matrix()


def choose(mistakes: Sequence[Mistake], count: int) -> list[int]:
    """Return up to `count` indices of `mistakes`, in ascending order; `mistakes` must be sorted by
    descending loss.

    Half of them are the mistakes with the largest loss. The others are taken from the rest: first
    those with the largest loss of their pair (true class, predicted class), then those with the
    second largest loss, and so on.
    """
    taken: Counter[tuple[Reference, Reference]] = Counter()
    ranks = []
    for mistake in mistakes:
        cell = (mistake.label, mistake.prediction)
        taken[cell] += 1
        ranks.append(taken[cell])
    worst = range(len(mistakes))[: count // 2]
    others = range(len(mistakes))[count // 2 :]
    by_cell = sorted(others, key=lambda place: (ranks[place], place))
    return sorted([*worst, *by_cell[: count - len(worst)]])


def data_source(data: object) -> str:
    """Return the data set in metrics.json as text: its name, and its folder if it has one."""
    values = (data.get("name"), data.get("root")) if isinstance(data, dict) else (data,)
    return text(", ".join(text(value) for value in values if value is not None))


def encode_calibration(bins: object) -> list[list[Any]]:
    """Return [mean confidence, accuracy, count] of each bin of confidence, with None in place of a
    damaged number.
    """
    parts = [part for part in bins if isinstance(part, dict)] if isinstance(bins, list) else []
    return [
        [optional(part.get(key)) for key in ("confidence", "accuracy", "count")]
        for part in parts[:100]
    ]


def optional(value: object) -> float | int | None:
    """Return `value`, rounded, if it is a finite number; None for anything else."""
    finite = number(value)
    return None if finite is None else rounded(finite)


def read_evaluations(files: RunFiles) -> dict[str, Evaluation]:
    """Return the evaluations of a run by folder name, at most `MAX_EVALUATIONS`; {} if they cannot
    be read.

    Raises:
        TransientError: the file system does not answer.
    """
    folder = files.folder / "evaluation"
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
            )
    except FileNotFoundError:
        return {}
    except OSError as error:
        files.unreadable("evaluation", error)
        return {}
    if len(names) > MAX_EVALUATIONS:
        files.problems.append(
            f"evaluation/ has more than {MAX_EVALUATIONS} folders; the others were left out."
        )
    return {name: Evaluation(RunFiles(folder / name)) for name in names[:MAX_EVALUATIONS]}


def thumbnail_shares(
    evaluations: Sequence[Evaluation], *, limit: int = MAX_THUMBNAILS
) -> Iterator[int]:
    """Yield the number of thumbnails of each evaluation, together at most `limit`.

    All evaluations get equally many; what an evaluation with fewer pictures does not need is
    divided among the others.
    """
    counts = [
        sum(mistake.picture is not None for mistake in evaluation.mistakes)
        for evaluation in evaluations
    ]
    shares = dict.fromkeys(range(len(counts)), 0)
    left = limit
    order = sorted(shares, key=counts.__getitem__)
    for position, place in enumerate(order):
        shares[place] = min(counts[place], left // (len(order) - position))
        left -= shares[place]
    yield from shares.values()
