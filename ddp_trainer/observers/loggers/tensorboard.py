"""``logger=tensorboard``: scalars, texts, pictures and hyperparameters as TensorBoard's event
files.
"""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_trainer.config.loggers import TensorBoardConfig
from ddp_trainer.observers.loggers.base import Logger, Value

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Writes to ``tensorboard/`` in the run directory. After a failed write, as on a full disk,
    begins a new file.
    """

    def __init__(self, config: TensorBoardConfig, run_dir: Path) -> None:
        self.folder = run_dir / "tensorboard"
        self.purge_step: int | None = None
        self.writer: SummaryWriter | None = None

    def start(self, step: int) -> None:
        # Also at step 0, because a launch that was killed before its first checkpoint may have left
        # records.
        self.purge_step = step + 1

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        for tag, value in values.items():
            if not isinstance(value, str):
                self._write(
                    lambda writer, tag=tag, value=value: writer.add_scalar(tag, value, step)
                )

    def image(self, tag: str, png: bytes, step: int) -> None:
        from PIL import Image
        from tensorboard.compat.proto import summary_pb2  # slow to import, and only rank 0 needs it

        protocol: Any = summary_pb2
        width, height = Image.open(BytesIO(png)).size
        picture = protocol.Summary.Image(width=width, height=height, encoded_image_string=png)
        summary = protocol.Summary(value=[protocol.Summary.Value(tag=tag, image=picture)])
        self._write(lambda writer: writer._get_file_writer().add_summary(summary, step))

    def text(self, tag: str, text: str, step: int) -> None:
        self._write(lambda writer: writer.add_text(tag, text, step))

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        plain = {
            key: v if isinstance(v, bool | int | float | str) else str(v)
            for key, v in config.items()
        }
        self._write(lambda writer: writer.add_hparams(plain, dict(results), run_name="."))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def _write(self, add: "Callable[[SummaryWriter], None]") -> None:
        # slow to import, and only rank 0 needs it
        from torch.utils.tensorboard import (
            SummaryWriter,
        )

        if self.writer is None:
            self.writer = SummaryWriter(self.folder, purge_step=self.purge_step)
            self.purge_step = None
        try:
            add(self.writer)
        except Exception:  # the writer's thread failed in an earlier call, and has ended
            self.writer = None
            raise
