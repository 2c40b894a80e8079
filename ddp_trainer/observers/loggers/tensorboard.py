"""``logger=tensorboard``: scalars, texts, pictures and hyperparameters in event files."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from ddp_trainer.config.composition import changed_values
from ddp_trainer.config.loggers import TensorBoardConfig
from ddp_trainer.observers.loggers.base import Logger, Value

DEBUG_GROUPS = ("launch/", "memory/", "rank/", "samples/", "straggler/", "time/")
"""The beginnings of tags that are seldom read; TensorBoard shows them under ``debug/``."""
SHOWN = ("time/step_ms", "time/data_wait_fraction", "memory/peak_mb")
"""Tags that keep their names all the same."""


class TensorBoardLogger(Logger):
    """Writes to ``tensorboard/`` in the run directory."""

    def __init__(self, config: TensorBoardConfig, run_dir: Path) -> None:
        self.folder = run_dir / "tensorboard"
        self.purge_step: int | None = None
        self._writer: SummaryWriter | None = None
        self._former_hook = threading.excepthook

    def start(self, step: int) -> None:
        # Also at step 0, because a launch that was killed before its first checkpoint may have left
        # records.
        self.purge_step = step + 1
        threading.excepthook = self._report_thread

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        with self.writer() as writer:
            for tag, value in values.items():
                if not isinstance(value, str) and tag != "epoch":
                    is_debug = tag.startswith(DEBUG_GROUPS) and tag not in SHOWN
                    name = f"debug/{tag}" if is_debug else tag
                    writer.add_scalar(name, value, step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        with self.writer() as writer:
            writer.add_image(tag, np.asarray(Image.open(BytesIO(png))), step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        with self.writer() as writer:
            writer.add_text(tag, text, step)

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in changed_values(config).items()
        }
        with self.writer() as writer:
            writer.add_hparams(plain, dict(results), run_name=".")

    def flush(self) -> None:
        with self.writer() as writer:
            writer.flush()

    def close(self) -> None:
        threading.excepthook = self._former_hook
        if self._writer is not None:
            self._writer.close()

    def _report_thread(self, arguments: threading.ExceptHookArgs) -> None:
        """Report a thread's exception, but not a writer's, which the next write raises again."""
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            self._former_hook(arguments)

    @contextmanager
    def writer(self) -> Iterator[SummaryWriter]:
        """Yield the writer; after a failed write, as on a full disk, yield a new one next time."""
        if self._writer is None:
            self._writer = SummaryWriter(self.folder, purge_step=self.purge_step)
            self.purge_step = None
        try:
            yield self._writer
        except Exception:  # the writer's thread failed in an earlier call, and has ended
            self._writer = None
            raise
