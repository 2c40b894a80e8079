"""``logger=mlflow``: where it records, one run over all launches, and a run that is gone."""

import os
import sqlite3
from pathlib import Path
from typing import Any

import yaml
from processes import on_ranks

from ddp_trainer.config.loggers import MlflowConfig
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.observers.loggers.mlflow_run import MlflowLogger


def record(folder: Path, *, uri: str | None = None, seed: int = 1) -> Any:
    """Record one launch in `folder`. Return the run, as MLflow has it."""
    values = {"seed": seed, "name": "x" * 9000, "lists": [1]}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    logger = MlflowLogger(MlflowConfig(tracking_uri=uri), folder)
    logger.start(0)
    logger.scalars({"epoch": 0, "a@b": 1.5, "nan": float("nan"), "text": "x"}, 1)
    logger.close()
    run = logger.client.get_run(logger.run_id)
    assert run.data.metrics["a_b"] == 1.5
    assert run.data.params == {"seed": "1", "name": "x" * 500, "lists": "[1]"}
    artifacts = Path(folder.parent, "mlartifacts", run.info.run_id, "artifacts")
    assert yaml.safe_load((artifacts / "config.yaml").read_text())["seed"] == seed
    return run


def record_in_many_ways(folder: str) -> None:
    """Record in the local database, with another config, after the run was deleted, and where the
    variable says.
    """
    from mlflow import MlflowClient

    rank = read_environment().rank
    run_dir = Path(folder, f"run{rank}")
    run_dir.mkdir()
    first = record(run_dir)
    assert first.info.status == "KILLED", "there were no results"
    assert record(run_dir, seed=2).info.run_id == first.info.run_id

    for content in (b"", b"\xff", b"0" * 16):
        (run_dir / "run_id").write_bytes(content + str(rank).encode())
        other = record(run_dir).info.run_id
        assert other != first.info.run_id
    local = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    local.delete_run(other)
    last = record(run_dir).info.run_id
    assert last != other

    with (
        sqlite3.connect(f"{folder}/mlflow.db") as database,
        sqlite3.connect(f"{folder}/{rank}.db") as copy,
    ):
        database.backup(copy)  # a new database takes seconds
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/{rank}.db"
    assert record(run_dir, seed=3).info.run_id == last
    assert len(local.get_metric_history(last, "a_b")) == 1
    record(run_dir, uri=f"sqlite:///{folder}/mlflow.db", seed=4)
    assert len(local.get_metric_history(last, "a_b")) == 2


def test_two_runs_share_a_new_database_and_continue_what_they_find(tmp_path: Path) -> None:
    folder = tmp_path / "é 100% #1"
    folder.mkdir()
    on_ranks(2, record_in_many_ways, str(folder))
