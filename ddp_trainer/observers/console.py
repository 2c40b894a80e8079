"""The console, with log messages of rank 0, warnings of other ranks and a progress bar; train.log,
of rank 0 only.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PACKAGE = logging.getLogger("ddp_trainer")


class DroppedHandler(logging.Handler):
    """A handler that removes itself if it cannot write: a closed terminal or a full disk never ends
    a training.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Remove this handler, and log a warning to the other handlers. `emit` calls this in an
        except clause.
        """
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):  # rich raises it for a pipe without a reader
            error = error.__context__
        # ValueError: the stream is closed, or lacks a character
        if not isinstance(error, OSError | ValueError):
            raise
        # A new list, because logging iterates over the old one, and removing an item would skip the
        # next handler.
        PACKAGE.handlers = [other for other in PACKAGE.handlers if other is not self]
        PACKAGE.warning("%s cannot be written any more (%s); training continues", self.name, error)


class ConsoleHandler(DroppedHandler):
    """Prints through rich's console, so that messages and a live progress bar do not mix; lines are
    not wrapped.
    """

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno == logging.WARNING else None
        try:
            get_console().print(
                self.format(record), style=style, markup=False, highlight=False, soft_wrap=True
            )
        except (Exception, SystemExit):
            self.handleError(record)


class LogFileHandler(DroppedHandler, logging.FileHandler):
    """Writes train.log."""


@contextmanager
def logging_to(run_dir: Path, *, rank: int) -> Iterator[None]:
    """Inside the context, send the package's messages to the console and, on rank 0, to train.log
    in `run_dir`.
    """
    handlers: list[DroppedHandler] = [ConsoleHandler()]
    handlers[0].set_name("the console")
    if rank == 0:
        handlers.append(LogFileHandler(run_dir / "train.log", encoding="utf-8"))
        handlers[1].set_name(str(run_dir / "train.log"))
        handlers[1].setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        handlers[0].setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    PACKAGE.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for handler in handlers:
        PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            PACKAGE.removeHandler(handler)
            with suppress(OSError):  # buffered text of an output that was lost
                handler.close()


@contextmanager
def progress_bar(
    text: str, *, step: int, steps: int, enabled: bool
) -> Iterator[Callable[[], None]]:
    """Show a progress bar from `step` to `steps` inside the context, if `enabled` and on a
    terminal.

    Yields a function that moves the bar by one step, or does nothing if there is no bar.
    """
    if not (enabled and get_console().is_terminal):
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=get_console(), transient=True)
    task = bar.add_task(text, total=steps, completed=step)
    with suppress(OSError):  # the terminal was closed
        bar.start()
    try:
        yield partial(bar.advance, task)
    finally:
        with suppress(OSError):
            bar.stop()
