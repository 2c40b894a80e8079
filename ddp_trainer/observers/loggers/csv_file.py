"""``logger=csv``: metrics.csv, a table with the columns ``time``, ``step``, ``epoch`` and one for
each tag.

The format is that of RFC 4180, with ``\\n`` at the end of a line. NaN and infinity are the texts
nan and inf.
"""

import csv
import io
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ddp_trainer.config.loggers import CsvConfig
from ddp_trainer.files import replace_text
from ddp_trainer.observers.loggers.base import Logger, Value
from ddp_trainer.observers.loggers.jsonl import MAX_PENDING, append

logger = logging.getLogger(__name__)

FIRST_COLUMNS = ("time", "step", "epoch")

Row = Mapping[str, object]


class CsvLogger(Logger):
    """Appends a row to metrics.csv. A record with a new tag replaces the file by one with an
    additional column.
    """

    def __init__(self, config: CsvConfig, run_dir: Path) -> None:
        self.path = run_dir / "metrics.csv"
        self.columns: Sequence[str] = ()
        self.pending: list[Row] = []

    def start(self, step: int) -> None:
        if self.path.exists():
            self.replace([], last_step=step)

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        self.pending = [*self.pending[-MAX_PENDING:], {"time": time.time(), "step": step, **values}]
        has_columns = self.path.exists() and all(
            set(row) <= set(self.columns) for row in self.pending
        )
        if has_columns:
            append(to_text(self.columns, self.pending), self.path)
        else:
            self.replace(self.pending)
        self.pending = []

    def replace(self, new_rows: Sequence[Row], *, last_step: int | None = None) -> None:
        """Write the file again: its undamaged rows up to `last_step` (None: all), then `new_rows`,
        with all columns.
        """
        columns, rows = read_rows(self.path) if self.path.exists() else ([], [])
        if not columns and self.path.exists() and self.path.stat().st_size > 0:
            damaged = self.path.with_name("metrics.csv.damaged")
            os.replace(self.path, damaged)
            logger.warning(
                "%s had no header with time, step and epoch: renamed it to %s",
                self.path,
                damaged.name,
            )
        kept = [row for row in rows if last_step is None or int(row["step"]) <= last_step]
        tags = (tag for row in new_rows for tag in row)
        columns = list(dict.fromkeys([*(columns or FIRST_COLUMNS), *tags]))
        header = dict(zip(columns, columns, strict=True))
        replace_text(self.path, to_text(columns, [header, *kept, *new_rows]))
        self.columns = columns


def to_text(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return `rows` as lines of CSV; if a row has no value for a column, its field is empty."""
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns of metrics.csv, and each undamaged row as a dict; two empty lists if the
    header is damaged.
    """
    whole_lines = path.read_bytes().decode("utf-8-sig", errors="replace").rpartition("\n")[0]
    reader = csv.reader(io.StringIO(whole_lines, newline=""), strict=True)
    columns: list[str] = []
    rows: list[dict[str, str]] = []
    while True:
        try:
            row = next(reader, None)
        except csv.Error:  # a damaged quotation mark, for example
            continue
        if row is None:
            return columns, rows
        if not columns:
            if not set(FIRST_COLUMNS) <= set(row) or len(set(row)) < len(row):
                return [], []
            columns = row
        elif len(row) == len(columns) and re.fullmatch(r"\d{1,18}", row[columns.index("step")]):
            rows.append(dict(zip(columns, row, strict=True)))
