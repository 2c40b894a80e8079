"""The progress of long work before the training: a bar on a terminal, elsewhere a line every 30
seconds.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_PER_LINE = 30.0


@contextmanager
def show_progress(task: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show the progress of `task`; yield a function that takes the number of newly
    finished items.
    """
    console = get_console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    number = bar.add_task(task, total=total)
    done = 0
    printed = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        bar.advance(number, count)
        if not console.is_terminal and time.monotonic() - printed > SECONDS_PER_LINE:
            printed = time.monotonic()
            # rich raises SystemExit when the reader of its pipe is gone
            with suppress(OSError, SystemExit):
                console.print(
                    f"{task}: {done:,}{'' if total is None else f' of {total:,}'}", highlight=False
                )

    with suppress(OSError):  # the terminal was closed
        bar.start()
    try:
        yield advance
    finally:
        with suppress(OSError):
            bar.stop()
