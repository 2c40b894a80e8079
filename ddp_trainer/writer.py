"""What a run tells: TensorBoard, metrics.jsonl, lines or a progress bar. Does nothing off rank 0."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp_trainer.config import flatten
from ddp_trainer.files import replace_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)


class Writer:
    """The one who writes. On other ranks every method does nothing. Use as a context manager."""

    def __init__(self, run_dir: Path, *, enabled: bool, console: Console, config: dict[str, Any]) -> None:
        self.run_dir, self.enabled, self.console, self.config = run_dir, enabled, console, config
        self._board: SummaryWriter | None = None
        self._metrics = None
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_bar()
        if self._board is not None:
            self._board.close()
        if self._metrics is not None:
            self._metrics.close()

    def open(self, *, step: int) -> None:
        """Begin to write after optimizer step `step`: what an earlier launch wrote past it is taken back."""
        if not self.enabled:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        path = self.run_dir / "metrics.jsonl"
        if path.exists():
            truncate_records(path, step=step)
        self._metrics = open(path, "a")  # noqa: SIM115 - closed in __exit__
        self._board = SummaryWriter(self.run_dir / "tensorboard", purge_step=step + 1 if step else None)
        self._board.add_text("config", f"```json\n{json.dumps(self.config, indent=2)}\n```", step)

    def scalars(self, tags: dict[str, float | str], *, step: int, epoch: int, at: float | None = None) -> None:
        """Record `tags` at optimizer step `step`: numbers in both places, text in metrics.jsonl only.

        at: unix seconds at which they came to be; default now.
        """
        if self._board is None or self._metrics is None:
            return
        at = time.time() if at is None else at
        record = {"time": at, "step": step, "epoch": epoch}
        for tag, value in tags.items():
            if isinstance(value, str):
                record[tag] = value  # type: ignore[assignment]
            else:
                self._board.add_scalar(tag, value, step, at)
                record[tag] = value if math.isfinite(value) else str(value)  # type: ignore[assignment]
        try:
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()
        except OSError as error:
            logger.warning("metrics of step %d were not written (%s); training goes on", step, error)

    def hparams(self, results: dict[str, float]) -> None:
        """Record the final `results` beside the config they came from."""
        if self._board is None:
            return
        kept = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in flatten(self.config).items()
        }
        self._board.add_hparams(kept, results, run_name=".")

    @contextmanager
    def epoch(self, epoch: int, *, epochs: int, step: int, steps: int) -> Iterator[None]:
        """Show epoch `epoch` of `epochs` as a bar from `step` to `steps`, on a terminal."""
        if self.enabled and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._bar.add_task(f"epoch {epoch + 1}/{epochs}", total=steps, completed=step)
        try:
            yield
        finally:
            self._stop_bar()

    def advance(self) -> None:
        """Move the bar on by one step."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def remove(self, name: str) -> None:
        """Take the run directory's file `name` away, if it is there."""
        if self.enabled:
            (self.run_dir / name).unlink(missing_ok=True)

    def file(self, name: str, text: str) -> None:
        """Put `text` into the run directory's file `name`, whole or not at all."""
        if not self.enabled:
            return
        try:
            replace_text(self.run_dir / name, text)
        except OSError as error:
            logger.warning("%s was not written: %s", self.run_dir / name, error)


def truncate_records(path: Path, *, step: int) -> None:
    """Drop from metrics.jsonl the records past optimizer step `step`, and a last line cut short by a kill."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= step:
            kept.append(line + "\n")
    replace_text(path, "".join(kept))
