"""``logger=tensorboard``: scalars, texts, pictures and hyperparameters in event files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from ddp_trainer.config.loggers import TensorBoardConfig
from ddp_trainer.observers.loggers.base import Logger, Value


class TensorBoardLogger(Logger):
    """Writes to ``tensorboard/`` in the run directory."""

    def __init__(self, config: TensorBoardConfig, run_dir: Path) -> None:
        self.folder = run_dir / "tensorboard"
        self.purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def start(self, step: int) -> None:
        # Also at step 0, because a launch that was killed before its first checkpoint may have left
        # records.
        self.purge_step = step + 1

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        with self.writer() as writer:
            for tag, value in values.items():
                if not isinstance(value, str):
                    writer.add_scalar(tag, value, step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        with self.writer() as writer:
            writer.add_image(tag, np.asarray(Image.open(BytesIO(png))), step, dataformats="HWC")

    def text(self, tag: str, text: str, step: int) -> None:
        with self.writer() as writer:
            writer.add_text(tag, text, step)

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        plain = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in config.items()
        }
        with self.writer() as writer:
            writer.add_hparams(plain, dict(results), run_name=".")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

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
