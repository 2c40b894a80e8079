"""``logger=mlflow``: a run on a tracking server, or in mlflow.db beside the run directory."""

import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from ddp_trainer.config.differences import flatten_keys
from ddp_trainer.config.loggers import MlflowConfig
from ddp_trainer.files import lock_file
from ddp_trainer.observers.loggers import base

MAX_VALUE = 500  # characters of a parameter, the limit of all server versions


class MlflowLogger(base.Logger):
    """Records all launches as one run: numbers as metrics, the config as parameters and a file.

    Steps that a resumed launch repeats have two values each. A parameter keeps the value of the
    first launch, because MLflow never changes parameters; config.yaml has the newest config.
    """

    in_background = True

    def __init__(self, config: MlflowConfig, run_dir: Path) -> None:
        self.mlflow = base.import_client("mlflow")
        self.config = config
        self.run_dir = run_dir
        self.client: Any = None
        self.run_id = ""
        self.status = "KILLED"

    def start(self, step: int) -> None:
        self.mlflow.environment_variables.MLFLOW_DISABLE_TELEMETRY.set(True)
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # no messages about new tables
        uri = self.config.tracking_uri
        artifacts = None  # the URI of a new experiment's files
        if uri is None and not self.mlflow.is_tracking_uri_set():
            folder = self.run_dir.resolve().parent
            uri = f"sqlite:///{folder}/mlflow.db"
            artifacts = (folder / "mlartifacts").as_uri()
            holder = f"another run creates {folder}/mlflow.db"
            # because MLflow does not lock a database in which it creates tables
            with lock_file(folder / ".mlflow.lock", seconds=60.0, holder=holder):
                self.mlflow.MlflowClient(uri)
        self.client = client = self.mlflow.MlflowClient(uri)

        with suppress(self.mlflow.MlflowException):  # the experiment exists
            client.create_experiment(self.config.experiment, artifacts)
        experiment_id = client.get_experiment_by_name(self.config.experiment).experiment_id
        tags = {"ddp_trainer_id": base.read_id(self.run_dir)}
        query = f"tags.ddp_trainer_id = '{tags['ddp_trainer_id']}'"
        runs = client.search_runs([experiment_id], query)
        runs = runs or [client.create_run(experiment_id, run_name=self.run_dir.name, tags=tags)]
        self.run_id = runs[0].info.run_id
        client.update_run(self.run_id, status="RUNNING")
        for key, value in flatten_keys(base.read_config(self.run_dir)).items():
            if key not in runs[0].data.params:
                client.log_param(self.run_id, key, str(value)[:MAX_VALUE])
        client.log_artifact(self.run_id, str(self.run_dir / "config.yaml"))

    def scalars(self, values: Mapping[str, base.Value], step: int) -> None:
        milliseconds = int(1000 * time.time())
        metrics = [
            # MLflow refuses other characters in a name
            self.mlflow.entities.Metric(re.sub(r"[^\w.\- :/]", "_", tag), value, milliseconds, step)
            for tag, value in values.items()
            if not isinstance(value, str)
        ]
        self.client.log_batch(self.run_id, metrics=metrics)

    def image(self, tag: str, png: bytes, step: int) -> None:
        picture = Image.open(BytesIO(png))
        self.client.log_image(self.run_id, picture, f"{tag}/step-{step:08d}.png")

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        self.scalars(results, 0)
        self.status = "FINISHED"

    def close(self) -> None:
        self.client.set_terminated(self.run_id, self.status)
