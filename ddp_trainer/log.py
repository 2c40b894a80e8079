"""Where log messages go: rank 0 to the console and train.log, other ranks' warnings to the console."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

PACKAGE = logging.getLogger("ddp_trainer")


class ConsoleHandler(logging.Handler):
    """Print through rich's console, so that messages and a live progress bar do not mix; lines are not wrapped."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno == logging.WARNING else None
        self.console.print(self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def logging_to(console: Console, *, rank: int, run_dir: Path) -> Iterator[None]:
    """Send the package's messages to `console` and, on rank 0, to train.log in `run_dir`."""
    handlers: list[logging.Handler] = [ConsoleHandler(console)]
    if rank == 0:
        handlers[0].setFormatter(logging.Formatter("%(message)s"))
        handlers.append(logging.FileHandler(run_dir / "train.log"))
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
            handler.close()
