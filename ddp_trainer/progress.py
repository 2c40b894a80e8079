"""The progress of long work on the console, and tables."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

SECONDS_PER_LINE = 30.0
MAX_WIDTH = 1000


@contextmanager
def show_progress(
    task: str, *, total: int | None = None, done: int = 0
) -> Iterator[Callable[[int], None]]:
    """Show the progress of `task` from `done` to `total` items inside the context.

    Yields a function that takes the number of newly finished items. Without a terminal, this
    function prints a line, at most every `SECONDS_PER_LINE`. total: None if it is not known.
    """
    console = get_console()
    if not console.is_terminal:
        yield _line_printer(task, total, done)
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    number = bar.add_task(task, total=total, completed=done)
    with suppress(OSError):  # the terminal was closed
        bar.start()
    try:
        yield lambda count: bar.advance(number, count)
    finally:
        with suppress(OSError):
            bar.stop()


def _line_printer(task: str, total: int | None, done: int) -> Callable[[int], None]:
    """Return a function that adds to `done` and prints it, at most every `SECONDS_PER_LINE`."""
    printed = time.monotonic()
    end = "" if total is None else f" of {total:,}"

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        if time.monotonic() - printed > SECONDS_PER_LINE:
            printed = time.monotonic()
            # rich raises SystemExit when the reader of its pipe is gone
            with suppress(OSError, SystemExit):
                get_console().print(f"{task}: {done:,}{end}", highlight=False)

    return advance


def print_table(table: Table) -> None:
    """Print a table on stdout; it may be `MAX_WIDTH` characters wide if stdout is no terminal."""
    Console(width=None if sys.stdout.isatty() else MAX_WIDTH).print(table)
