"""``logger=wandb``: a run of Weights & Biases, and its files in ``wandb/`` of the run directory."""

import html
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from PIL import Image

from ddp_trainer.config.loggers import WandbConfig, WandbMode
from ddp_trainer.files import replace_text
from ddp_trainer.observers.loggers.base import Logger, Value, import_client

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

SETTINGS = {
    "silent": True,
    "console": "off",
    "init_timeout": 20.0,
    "finish_timeout": 20.0,
    # Nothing about the host, the user's files and other packages is recorded.
    "host": "",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "label_disable": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    # A killed run loses the records of this time; the default is 15 seconds.
    "x_transaction_log_flush_interval": 1.0,
}
"""Settings of wandb. A setting that the installed version does not know is left out."""
MAX_BEGINS = 4
"""How often a launch may begin or continue its run: again if wandb's service process was killed."""


class WandbLogger(Logger):
    """Records all launches in one run of wandb. The x axis is the metric ``step``, the optimizer
    step.

    If a launch resumes from an earlier step, the steps that it repeats have two records each.
    Without a login, or if the server does not answer, the launch is recorded offline, for ``wandb
    sync``.
    """

    in_background = True

    def __init__(self, config: WandbConfig, run_dir: Path) -> None:
        self.wandb = import_client("wandb", config)
        self.config = config
        self.run_dir = run_dir
        self.mode = None if config.mode is WandbMode.auto else config.mode.name
        self.run: wandb.Run | None = None
        self.num_begins = 0

    def start(self, step: int) -> None:
        self.begin()

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        self.log(values, step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        self.log({tag: self.wandb.Image(Image.open(BytesIO(png)))}, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self.log({tag: self.wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step)

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        run = self.run or self.begin()
        run.summary.update(dict(results))

    def close(self) -> None:
        run = self.run
        self.run = None
        try:
            if run is not None:
                run.finish()
        finally:
            self.end_service()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Add a row to the history. If this fails, the row is lost, and the next call continues the
        run.
        """
        run = self.run or self.begin()
        try:
            run.log({**values, "step": step})
        except Exception:
            with suppress(Exception, SystemExit):
                self.close()
            raise

    def begin(self) -> "wandb.Run":
        """Begin or continue the run, offline if this fails online. Record the config, and return
        the run.
        """
        self.num_begins += 1
        if self.num_begins > MAX_BEGINS:
            raise RuntimeError(f"its run could not be recorded in {MAX_BEGINS} attempts")
        try:
            self.run = self.init()
        except Exception as error:
            if self.mode == "offline":
                raise
            # because the service process does not accept the run's id a second time
            self.end_service()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            path = self.run_dir / "wandb"
            logger.warning(
                "logger=wandb records offline (%s); upload with: wandb sync %s/offline-run-*",
                reason,
                path,
            )
            self.mode = "offline"
            self.run = self.init()
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")
        config = yaml.safe_load((self.run_dir / "config.yaml").read_text())
        self.run.config.update(config, allow_val_change=True)
        return self.run

    def init(self) -> "wandb.Run":
        """Begin or continue the run, and return it. If `mode` is None, the user's own setting of
        wandb is used.
        """
        known = self.wandb.Settings.model_fields
        settings = self.wandb.Settings(
            **{name: value for name, value in SETTINGS.items() if name in known}
        )
        # Before init, because only global settings keep wandb from asking for a login and from
        # sending telemetry.
        self.wandb.setup(
            self.wandb.Settings(silent=True, **({"mode": self.mode} if self.mode else {}))
        )
        return self.wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            group=self.config.group,
            tags=self.config.tags,
            name=self.run_dir.name,
            id=self.run_id(),
            resume="allow",
            mode=self.mode,
            dir=self.run_dir,
            reinit="create_new",  # does not end a run that the user's program has begun
            settings=settings,
        )

    def run_id(self) -> str:
        """Return the id of the run, which is kept in the run directory for later launches."""
        path = self.run_dir / "wandb" / "run_id"
        run_id = path.read_text(errors="replace").strip() if path.exists() else ""
        if not (run_id.isascii() and run_id.isalnum()):  # damaged, or the first launch
            run_id = secrets.token_hex(8)
            path.parent.mkdir(exist_ok=True)
            replace_text(path, run_id + "\n")
        return run_id

    def end_service(self) -> None:
        """End the process that writes and sends the records, unless the user's program has its own
        run of wandb.
        """
        if self.wandb.run is None:
            self.wandb.teardown()
