"""The console, with messages of rank 0, warnings of other ranks, a progress bar; and train.log."""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich import get_console

from ddp_trainer.distributed.world import World
from ddp_trainer.progress import show_progress
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)
PACKAGE = logging.getLogger("ddp_trainer")


class DroppedHandler(logging.Handler):
    """A handler that removes itself if it cannot write, because training goes on without it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Remove this handler, and log a warning to the others; called in an except clause."""
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
    """Prints through rich's console, so that messages and a live progress bar do not mix."""

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
    """Send the package's messages to the console and, on rank 0, to train.log in `run_dir`."""
    console = ConsoleHandler()
    console.set_name("the console")
    handlers: list[DroppedHandler] = [console]
    if rank == 0:
        path = run_dir / "train.log"
        file = LogFileHandler(path, encoding="utf-8")
        file.set_name(str(path))
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(file)
    else:
        console.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
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
    """Shows a bar of the epoch's steps on a terminal, up to the evaluation."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.close = self.stack.close

    @staticmethod
    def is_wanted(world: World) -> bool:
        """Return whether this rank shows the bar: rank 0, if the console is a terminal."""
        return world.is_main and get_console().is_terminal

    def on_epoch(self, run: TrainingRun) -> None:
        text = f"epoch {run.epoch + 1}/{run.config.epochs}"
        done = run.step % run.steps_per_epoch
        bar = show_progress(text, total=run.steps_per_epoch, done=done)
        self.advance = self.stack.enter_context(bar)

    def on_step(self, run: TrainingRun) -> None:
        self.advance(1)

    def on_evaluation(self, run: TrainingRun) -> None:
        self.close()
