"""Log messages: rank 0's on the console and in train.log, other ranks' warnings on the console; the progress bar."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PACKAGE = logging.getLogger("ddp_trainer")


class DroppedHandler(logging.Handler):
    """A handler that drops itself when its output is lost: a closed terminal or a full disk never ends a training."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Remove this handler and say so on those that are left. Called inside of `emit`'s except clause."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):  # rich's answer to a pipe without a reader
            error = error.__context__
        if not isinstance(error, OSError | ValueError):  # ValueError: the stream is closed, or lacks a character
            raise
        PACKAGE.removeHandler(self)
        PACKAGE.warning("%s cannot be written any more (%s); training continues", self.name, error)


class ConsoleHandler(DroppedHandler):
    """Prints through rich's console, so that messages and a live progress bar do not mix; lines are not wrapped."""

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno == logging.WARNING else None
        try:
            get_console().print(self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)
        except (Exception, SystemExit):
            self.handleError(record)


class LogFileHandler(DroppedHandler, logging.FileHandler):
    """Writes train.log."""


@contextmanager
def logging_to(run_dir: Path, *, rank: int) -> Iterator[None]:
    """Send the package's messages to the console and, on rank 0, to train.log in `run_dir`."""
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
            with suppress(OSError):  # what is buffered of a lost output
                handler.close()


class EpochProgress:
    """A progress bar over the steps of an epoch, on a terminal; elsewhere it does nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled and get_console().is_terminal
        self.bar: Progress | None = None

    @contextmanager
    def epoch(self, epoch: int, *, epochs: int, step: int, steps: int) -> Iterator[None]:
        """Show epoch `epoch` of `epochs` from `step` to `steps` inside the context."""
        if not self.enabled:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=get_console(), transient=True)
        self.bar.add_task(f"epoch {epoch + 1}/{epochs}", total=steps, completed=step)
        with suppress(OSError):  # the terminal was closed
            self.bar.start()
        try:
            yield
        finally:
            with suppress(OSError):
                self.bar.stop()
            self.bar = None

    def advance(self) -> None:
        """Move the bar by one step."""
        if self.bar is not None:
            self.bar.advance(self.bar.task_ids[0])
