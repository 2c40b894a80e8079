"""``logger=mlflow``: a run of MLflow, on a tracking server or in the database mlflow.db beside the
run directory.
"""

import logging
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddp_trainer.config.errors import flatten_keys
from ddp_trainer.config.loggers import MlflowConfig
from ddp_trainer.files import lock_file, replace_text
from ddp_trainer.observers.loggers.base import Logger, Value, import_client

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

MAX_NAME = 250
MAX_VALUE = 500
MAX_PARAMS = 100
"""The limits of all server versions: characters of a name, characters of a value, parameters in a
request.
"""
LOCK_SECONDS = 60.0
"""How long a run waits while another run creates the database."""


class MlflowLogger(Logger):
    """Records all launches in one run of MLflow. Numbers are metrics, texts are tags, pictures are
    artifacts.

    If a launch resumes from an earlier step, the steps that it repeats have two values each. MLflow
    does not allow a parameter to change, so if a later launch changes a key of the config, the new
    value is a tag.
    """

    in_background = True

    def __init__(self, config: MlflowConfig, run_dir: Path) -> None:
        self.mlflow = import_client("mlflow", config)
        self.config = config
        self.run_dir = run_dir
        self.client: MlflowClient | None = None
        self.run_id = ""
        self.is_finished = False

    def start(self, step: int) -> None:
        self.connect()

    def scalars(self, values: Mapping[str, Value], step: int) -> None:
        from mlflow.entities import Metric, RunTag

        client = self.connect()
        now = int(time.time() * 1000)
        metrics = [
            Metric(name_for(tag), v, now, step)
            for tag, v in values.items()
            if not isinstance(v, str)
        ]
        texts = [
            RunTag(name_for(tag), v[:MAX_VALUE]) for tag, v in values.items() if isinstance(v, str)
        ]
        client.log_batch(self.run_id, metrics=metrics, tags=texts)

    def image(self, tag: str, png: bytes, step: int) -> None:
        self.log_file(tag, png, f"step-{step:08d}.png")

    def text(self, tag: str, text: str, step: int) -> None:
        self.log_file(tag, text.encode(), f"step-{step:08d}.md")

    def hparams(self, config: Mapping[str, Any], results: Mapping[str, float]) -> None:
        client = self.connect()
        for tag, value in results.items():
            client.log_metric(self.run_id, name_for(tag), value)
        self.is_finished = True

    def close(self) -> None:
        if self.client is not None:
            self.client.set_terminated(self.run_id, "FINISHED" if self.is_finished else "KILLED")

    def log_file(self, tag: str, content: bytes, name: str) -> None:
        """Record `content` as the artifact `name` in the folder of `tag`."""
        client = self.connect()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.write_bytes(content)
            client.log_artifact(self.run_id, str(path), name_for(tag))

    def connect(self) -> "MlflowClient":
        """Return the client. The first call that succeeds begins or continues the run, and records
        the config.
        """
        if self.client is None:
            client, artifacts = self.build_client()
            run = self.continue_run(client)
            if run is None:
                run = client.create_run(
                    self.experiment_id(client, artifacts), run_name=self.run_dir.name
                )
                # for later launches
                replace_text(self.run_dir / "mlflow_run_id", run.info.run_id + "\n")
            self.log_config(client, run)
            self.client = client
            self.run_id = run.info.run_id
        return self.client

    def build_client(self) -> "tuple[MlflowClient, str | None]":
        """Return a client and the URI of the folder for artifacts, which is None if the server
        chooses the folder.
        """
        from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

        MLFLOW_DISABLE_TELEMETRY.set(True)  # read at each call, not only at the import
        # because MLflow prints how it creates tables
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        if self.config.tracking_uri is not None or self.mlflow.is_tracking_uri_set():
            return self.mlflow.MlflowClient(self.config.tracking_uri), None
        folder = self.run_dir.resolve().parent
        self.create_database(folder / "mlflow.db")
        return self.mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db"), (
            folder / "mlartifacts"
        ).as_uri()

    def create_database(self, path: Path) -> None:
        """Create the database `path` unless it exists. If several runs do so at once, one creates
        it, the others wait.

        MLflow takes seconds to create the tables, and cannot use a database that another process
        has not finished yet, or left unfinished when it was killed. MLflow no longer supports a
        folder of files in place of a database:
        https://mlflow.org/docs/latest/self-hosting/migrate-from-file-store
        """
        if path.exists():
            return
        with lock_file(
            path.with_name(".mlflow.lock"),
            seconds=LOCK_SECONDS,
            holder=f"another run creates {path}",
        ):
            if not path.exists():
                for leftover in path.parent.glob(".mlflow.db.writing*"):
                    leftover.unlink()
                unfinished = path.with_name(".mlflow.db.writing")
                self.mlflow.MlflowClient(f"sqlite:///{unfinished}")
                unfinished.rename(path)

    def continue_run(self, client: "MlflowClient") -> "Run | None":
        """Return the run of an earlier launch, and set its status to RUNNING; None if the server
        does not have it.
        """
        from mlflow.exceptions import MlflowException

        path = self.run_dir / "mlflow_run_id"
        if not path.exists():
            return None
        try:
            run = client.get_run(path.read_text(errors="replace").strip())
            client.update_run(run.info.run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return run

    def experiment_id(self, client: "MlflowClient", artifacts: str | None) -> str:
        """Return the id of the experiment, created if missing. artifacts: the URI of its files;
        None: the default.
        """
        from mlflow.exceptions import MlflowException

        name = self.config.experiment
        experiment = client.get_experiment_by_name(name)
        try:
            return (
                client.create_experiment(name, artifacts)
                if experiment is None
                else experiment.experiment_id
            )
        except MlflowException as error:
            experiment = client.get_experiment_by_name(name)
            if error.error_code != "RESOURCE_ALREADY_EXISTS" or experiment is None:
                raise
            return experiment.experiment_id  # another run has created it at the same time

    def log_config(self, client: "MlflowClient", run: "Run") -> None:
        """Record the config in `run`: new keys as parameters, values that differ from recorded
        parameters as tags.
        """
        from mlflow.entities import Param, RunTag

        config = flatten_keys(yaml.safe_load((self.run_dir / "config.yaml").read_text()))
        values = {name_for(key): str(value)[:MAX_VALUE] for key, value in config.items()}
        recorded = run.data.params
        params = [Param(key, value) for key, value in values.items() if key not in recorded]
        tags = [
            RunTag(key, value) for key, value in values.items() if recorded.get(key, value) != value
        ]
        for first in range(0, len(params), MAX_PARAMS):
            client.log_batch(run.info.run_id, params=params[first : first + MAX_PARAMS])
        client.log_batch(run.info.run_id, tags=tags)


def name_for(tag: str) -> str:
    """Return `tag` as a name for MLflow: letters, digits, spaces, ``_.-:`` and single ``/``; others
    become ``_``.
    """
    parts = re.sub(r"[^\w.\- :/]", "_", tag[:MAX_NAME]).split("/")
    name = "/".join(part for part in parts if part not in ("", ".", ".."))
    return re.sub(r"^\.\.", "__", name) or "_"
