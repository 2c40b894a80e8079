"""Reads a table of text: CSV, TSV, JSON lines or Parquet."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ddp_trainer.config.errors import ConfigError, one_line, path_error, printable, require


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file below its header."""

    file: Path
    names: list[str]
    """The names of the columns."""
    rows: Sequence[Sequence[str]]
    """For each row the value of each column."""
    numbers: Sequence[int]
    """For each row the number of its line, from 1; in Parquet, of the row."""

    def column(self, name: str) -> list[str]:
        """Return the values of a column, without spaces at their ends."""
        place = self.names.index(name)
        return [row[place].strip() for row in self.rows]

    def require(self, is_right: Sequence[bool], reason: Callable[[int], str]) -> None:
        """Raise ConfigError for the first row that is wrong; ``reason(index)`` follows its name."""
        if not all(is_right):
            index = list(is_right).index(False)
            raise self.error(index, reason(index))

    def error(self, index: int, reason: str) -> ConfigError:
        """Return the error of a row. index: its place in `rows`."""
        return ConfigError(f"{self.file}, row {self.numbers[index]} {reason}")


def read_table(file: Path) -> Table:
    """Return the table in `file`, whose format is known by the ending of its name.

    Raises:
        ConfigError: the format is unknown, or a row is wrong; TransientError: the file cannot be
            read now.
    """
    readers = {
        ".csv": read_separated,
        ".tsv": read_separated,
        ".jsonl": read_json_lines,
        ".parquet": read_parquet,
    }
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"{file} must end in {', '.join(readers)}, which says what it contains")
    try:
        table = reader(file)
    except OSError as error:
        raise path_error(error, f"{file} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 ({error}): save it with this encoding") from error
    require(bool(table.rows), f"{file} has no rows")
    repeated = [name for name, count in Counter(table.names).items() if count > 1]
    require(not repeated, f"{file} has two columns {printable(', '.join(repeated[:1]))!r}")
    return table


def read_separated(file: Path) -> Table:
    """Read CSV or TSV; a CSV file may have semicolons or tabs, as spreadsheets write them."""
    # utf-8-sig: spreadsheets write a byte order mark
    with file.open(encoding="utf-8-sig", newline="") as text:
        delimiter = "\t" if file.suffix.lower() == ".tsv" else delimiter_of(text)
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        rows = []
        numbers = []
        try:
            for row in reader:
                if row:  # not an empty line
                    rows.append(row)
                    numbers.append(reader.line_num)
        except csv.Error as error:
            raise ConfigError(f"{file}, row {reader.line_num} is no CSV: {error}") from error
    require(bool(rows), f"{file} is empty: its first row must have the names of the columns")
    names = [name.strip() for name in rows[0]]
    table = Table(file, names, rows[1:], numbers[1:])
    table.require(
        [len(row) == len(names) for row in table.rows],
        lambda index: (
            f"has {len(table.rows[index])} values, and the header has {len(names)}: add what is"
            f" missing; a value that contains {reader.dialect.delimiter!r} needs quotation marks"
        ),
    )
    return table


def delimiter_of(text: TextIO) -> str:
    """Return the delimiter that the header has most often."""
    header = text.readline()
    text.seek(0)
    return max((",", ";", "\t"), key=header.count)


def read_json_lines(file: Path) -> Table:
    """Read one JSON object in each line; the columns are the keys of all of them."""
    objects: list[dict[str, Any]] = []
    numbers = []
    with file.open(encoding="utf-8-sig") as text:
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{file}, row {number} is no JSON: {error}") from error
            require(isinstance(value, dict), f"{file}, row {number} must be a JSON object")
            objects.append(value)
            numbers.append(number)
    return table_of(file, objects, numbers)


def read_parquet(file: Path) -> Table:
    """Read a Parquet file with pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ConfigError(f"{file} needs pyarrow: pip install 'ddp_trainer[parquet]'") from error
    try:
        columns = parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # of the file system
            raise
        raise ConfigError(f"{file} is no Parquet file: {one_line(error)}") from error

    def texts(column: Any) -> list[str]:
        try:
            return column.cast(pyarrow.string()).fill_null("").to_pylist()
        except pyarrow.ArrowException:  # for example of images, which no key names
            return [""] * len(column)

    rows = list(zip(*map(texts, columns.columns), strict=True))
    return Table(file, columns.column_names, rows, range(1, len(rows) + 1))


def table_of(file: Path, objects: list[dict[str, Any]], numbers: Sequence[int]) -> Table:
    """Return the table of `objects`; a missing value and null are empty texts."""
    names = list(dict.fromkeys(name for value in objects for name in value))
    rows = [["" if value.get(n) is None else str(value[n]) for n in names] for value in objects]
    return Table(file, names, rows, numbers)
