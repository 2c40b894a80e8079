"""The results of benchmark and plan: a table on the console, and files."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddp_trainer.config.errors import TransientError


def print_table(table: Table) -> None:
    """Print a table with its numbers aligned, at its full width where the output is not a terminal."""
    for column in table.columns[1:]:
        column.justify = "right"
    Console(width=None if sys.stdout.isatty() else 180).print(table)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Create the folder of `path`, a file that the context's body writes; TransientError if either fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise TransientError(f"{path} was not written: {error.strerror}") from error
    print(f"wrote {path}")
