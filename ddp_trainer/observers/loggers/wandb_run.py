"""``logger=wandb``: a run of Weights & Biases, and its files in ``wandb/`` of the run directory."""

import logging
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from ddp_trainer.config.loggers import WandbConfig, WandbMode
from ddp_trainer.observers.loggers import base

TIMEOUTS = {"init_timeout": 20.0, "finish_timeout": 20.0}
PRIVACY = {"x_disable_machine_info": True, "x_save_requirements": False, "disable_code": True}
"""Settings that exclude host statistics, installed packages and the user's code from a record."""


class WandbLogger(base.Logger):
    """Records all launches as one run; offline if there is no login or the server does not answer.

    The steps that a resumed launch repeats have two records each.
    """

    in_background = True

    def __init__(self, config: WandbConfig, run_dir: Path) -> None:
        self.wandb = base.import_client("wandb")
        self.config = config
        self.run_dir = run_dir
        self.run: Any = None

    def start(self, step: int) -> None:
        mode = self.config.mode
        try:
            self.begin({} if mode is WandbMode.auto else {"mode": mode.name})
        except Exception as error:
            text = "logger=wandb records offline (%s); upload with: wandb sync %s/offline-run-*"
            folder = self.run_dir / "wandb"
            logging.getLogger(__name__).warning(text, base.one_line(error), folder)
            self.end_service()  # because the service does not accept a run's id twice
            self.begin({"mode": "offline"})

    def begin(self, mode: dict[str, str]) -> None:
        """Begin or continue the run; if `mode` is empty, the user's WANDB_MODE decides."""
        # Only global settings keep wandb from asking for a login.
        self.wandb.setup(self.wandb.Settings(silent=True, **mode))
        keys = ("project", "entity", "group", "tags")
        self.run = self.wandb.init(
            name=self.run_dir.name,
            id=base.read_id(self.run_dir),
            resume="allow",
            dir=self.run_dir,
            config=base.read_config(self.run_dir),
            allow_val_change=True,
            reinit="create_new",  # does not end a run of the user's program
            settings=self.wandb.Settings(console="off", host="", **TIMEOUTS, **PRIVACY, **mode),
            **{key: getattr(self.config, key) for key in keys},
        )
        self.run.define_metric("*", step_metric="step")  # the x axis is the optimizer step

    def scalars(self, values: Mapping[str, Any], step: int) -> None:
        self.run.log({**values, "step": step})

    def image(self, tag: str, png: bytes, step: int) -> None:
        self.scalars({tag: self.wandb.Image(Image.open(BytesIO(png)))}, step)

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
