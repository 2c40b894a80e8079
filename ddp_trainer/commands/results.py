"""The results of benchmark and plan: a table on the console, and files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddp_trainer.config.errors import path_error


def print_table(table: Table) -> None:
    """Print a table, aligned right but for the first column; 180 wide if there is no terminal."""
    for column in table.columns[1:]:
        column.justify = "right"
    Console(width=None if sys.stdout.isatty() else 180).print(table)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Create the folder of `path`, which the ``with`` block writes; OSError is a `path_error`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise path_error(error, f"{path} was not written: {error.strerror or error}") from error
    print(f"wrote {path}")
