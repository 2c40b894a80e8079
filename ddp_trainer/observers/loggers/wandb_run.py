"""``logger=wandb``: a run of Weights & Biases, and its files in ``wandb/`` of the run directory."""

import html
import logging
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from ddp_trainer.config.loggers import WandbConfig, WandbMode
from ddp_trainer.observers.loggers.base import (
    Logger,
    Value,
    import_client,
    one_line,
    read_config,
    read_id,
)

logger = logging.getLogger(__name__)

TIMEOUTS = {"init_timeout": 20.0, "finish_timeout": 20.0}
PRIVACY = {"x_disable_machine_info": True, "x_save_requirements": False, "disable_code": True}
"""Settings with which no statistics of the host, packages and code of the user are recorded."""


class WandbLogger(Logger):
    """Records all launches as one run, offline without a login or if the server does not answer.

    The steps that a resumed launch repeats have two records each.
    """

    in_background = True

    def __init__(self, config: WandbConfig, run_dir: Path) -> None:
        self.wandb = import_client("wandb", config)
        self.config = config
        self.run_dir = run_dir
        self.run_id = read_id(run_dir)
        self.run: Any = None

    def start(self, step: int) -> None:
        mode = self.config.mode
        try:
            self.begin({} if mode is WandbMode.auto else {"mode": mode.name})
        except Exception as error:
            logger.warning(
                "logger=wandb records offline (%s); upload with: wandb sync %s/wandb/offline-run-*",
                one_line(error),
                self.run_dir,
            )
            self.end_service()  # because it does not accept the run's id a second time
            self.begin({"mode": "offline"})

    def begin(self, mode: dict[str, str]) -> None:
        """Begin or continue the run; an empty `mode` is that of the user's WANDB_MODE."""
        # Only global settings keep wandb from asking for a login.
        self.wandb.setup(self.wandb.Settings(silent=True, **mode))
        self.run = self.wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            group=self.config.group,
            tags=self.config.tags,
            name=self.run_dir.name,
            id=self.run_id,
            resume="allow",
            dir=self.run_dir,
            config=read_config(self.run_dir),
            allow_val_change=True,
            reinit="create_new",  # does not end a run of the user's program
            settings=self.wandb.Settings(console="off", host="", **TIMEOUTS, **PRIVACY, **mode),
        )
        self.run.define_metric("*", step_metric="step")  # the x axis is the optimizer step

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        self.run.log({**values, "step": step})

    def image(self, tag: str, png: bytes, step: int) -> None:
        self.run.log({tag: self.wandb.Image(Image.open(BytesIO(png))), "step": step})

    def text(self, tag: str, text: str, step: int) -> None:
        self.run.log({tag: self.wandb.Html(f"<pre>{html.escape(text)}</pre>"), "step": step})

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        self.run.summary.update(dict(results))

    def close(self) -> None:
        try:
            self.run.finish()
        finally:
            self.end_service()

    def end_service(self) -> None:
        """End the process that writes and sends records, unless the user's program has a run."""
        if self.wandb.run is None:
            self.wandb.teardown()
