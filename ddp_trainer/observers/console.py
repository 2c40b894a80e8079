"""Log messages on the console and in train.log, a line after each epoch, and the progress bar."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich import get_console

from ddp_trainer.config.errors import escape_controls, path_error
from ddp_trainer.distributed.world import World
from ddp_trainer.progress import show_progress
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)
PACKAGE = logging.getLogger("ddp_trainer")


class DroppedHandler(logging.Handler):
    """A log handler that removes itself after a failed write, so that training continues."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of `record`, in which control characters are escaped."""
        return escape_controls(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Remove this handler, and log a warning through the other handlers.

        `emit` calls this in an except clause. Errors other than OSError, ValueError are re-raised.
        """
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):  # rich raises it for a pipe without a reader
            error = error.__context__
        # ValueError: the stream is closed, or its encoding lacks a character of the message
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
    """Log to the console and, on rank 0, to train.log in `run_dir`, inside the context.

    Ranks other than 0 log only warnings and errors.
    """
    console = ConsoleHandler()
    console.set_name("the console")
    handlers: list[DroppedHandler] = [console]
    if rank == 0:
        path = run_dir / "train.log"
        try:
            file = LogFileHandler(path, encoding="utf-8")
        except OSError as error:
            reason = f"{path} cannot be written ({error.strerror}): remove it"
            raise path_error(error, reason) from error
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
            # Closing the file writes its buffered text, and fails again if the disk is full.
            with suppress(OSError):
                handler.close()


class SkipWarning(Observer):
    """Warns of the first skipped update of a launch, for on_nonfinite=skip."""

    def on_log(self, run: TrainingRun) -> None:
        if skipped := run.values["optim/skipped_updates"]:
            run.events.stop_calling("on_log", self)
            logger.warning(
                "%g updates up to step %d were skipped, because their gradients are not finite:"
                " optim/skipped_updates in metrics.jsonl counts them",
                skipped,
                run.step,
            )


class EpochLines(Observer):
    """Logs a line after each evaluation."""

    def __init__(self) -> None:
        self.first_step = 0
        self.began = time.perf_counter()

    def on_start(self, run: TrainingRun) -> None:
        self.first_step = run.step
        self.began = time.perf_counter()

    def on_evaluation(self, run: TrainingRun) -> None:
        place = f"epoch {run.epoch + 1}/{run.config.epochs}"
        trained = "nothing left to train" if run.is_trained else "trained by ranks that are lost"
        if last := run.last_logged:
            trained = f"loss {last['train/loss']:.4f} · train {last['train/top1']:.4f}"
            if rate := last.get("throughput/images_per_second"):
                trained = f"{trained} · {rate:,.0f} img/s"
        split = run.loaders.datasets.eval_split
        left = self.time_left(run)
        logger.info("%s · %s · %s %.4f%s", place, trained, split, run.evaluation.top1, left)

    def time_left(self, run: TrainingRun) -> str:
        """Return `` · 4 min left``, from the speed of this launch so far; "" if it ends now."""
        steps = run.step - self.first_step
        if run.is_trained or not steps:
            return ""
        seconds = (time.perf_counter() - self.began) / steps * (run.last_step - run.step)
        if seconds < 90:
            return f" · {seconds:.0f} s left"
        return (
            f" · {seconds / 60:.0f} min left"
            if seconds < 5400
            else f" · {seconds / 3600:.1f} h left"
        )


class ProgressBar(Observer):
    """Shows a progress bar of the steps of each epoch, and removes it after the evaluation."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.close = self.stack.close
        self.shown = 0
        """The number of steps that the bar shows, over all epochs."""

    @staticmethod
    def is_wanted(world: World) -> bool:
        """Return whether this rank shows the bar: rank 0, if the console is a terminal."""
        return world.is_main and get_console().is_terminal

    def on_epoch(self, run: TrainingRun) -> None:
        text = f"epoch {run.epoch + 1}/{run.config.epochs}"
        done = run.step % run.steps_per_epoch
        self.shown = run.step
        bar = show_progress(text, total=run.steps_per_epoch, done=done)
        self.advance = self.stack.enter_context(bar)

    def on_step(self, run: TrainingRun) -> None:
        # not one: in asynchronous training, a rank takes more or fewer steps than there are updates
        self.advance(run.step - self.shown)
        self.shown = run.step

    def on_evaluation(self, run: TrainingRun) -> None:
        self.close()
