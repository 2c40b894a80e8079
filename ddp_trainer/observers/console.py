"""The console, with log messages of rank 0, warnings of other ranks and a progress bar; train.log,
of rank 0 only.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp_trainer.distributed.world import World
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)
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


class EpochLines(Observer):
    """Logs a line after each evaluation."""

    def on_evaluation(self, run: TrainingRun) -> None:
        place = f"epoch {run.epoch + 1}/{run.config.epochs}"
        trained = "nothing left to train"
        if last := run.last_logged:
            rate = last["throughput/images_per_second"]
            trained = f"loss {last['train/loss']:.4f} · train {last['train/top1']:.4f}"
            trained = f"{trained} · {rate:,.0f} img/s"
        split = run.config.data.eval_split
        logger.info("%s · %s · %s %.4f", place, trained, split, run.evaluation.top1)


class ProgressBar(Observer):
    """Shows a bar of the epoch's steps on a terminal."""

    def __init__(self) -> None:
        self.bar: Progress | None = None

    @staticmethod
    def is_wanted(world: World) -> bool:
        """Return whether this rank shows the bar: rank 0, if the console is a terminal."""
        return world.is_main and get_console().is_terminal

    def on_epoch(self, run: TrainingRun) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        text = f"epoch {run.epoch + 1}/{run.config.epochs}"
        done = run.step % run.steps_per_epoch
        self.bar = Progress(*columns, console=get_console(), transient=True)
        self.task = self.bar.add_task(text, total=run.steps_per_epoch, completed=done)
        with suppress(OSError):  # the terminal was closed
            self.bar.start()

    def on_step(self, run: TrainingRun) -> None:
        if self.bar is not None:
            self.bar.advance(self.task)

    def on_phase(self, run: TrainingRun, phase: Phase) -> None:
        if phase is Phase.evaluation:
            self.close()

    def close(self) -> None:
        """Remove the bar; to be called at the end of a launch, however it ends."""
        if self.bar is not None:
            with suppress(OSError):
                self.bar.stop()
        self.bar = None
