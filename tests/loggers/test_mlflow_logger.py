"""``logger=mlflow``: names that it accepts, where it records, and a run that is gone."""

import os
import sqlite3
from pathlib import Path

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import on_ranks

from ddp_trainer.config.loggers import MlflowConfig
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.observers.loggers.mlflow_run import MlflowLogger, name_for


@settings(deadline=None)  # the first import of mlflow is slow
@given(st.text() | st.text(alphabet="a/. @"))
@example("train/loss")
@example("a" * 249 + "/b")
@example("\n")
@example("é/ß:1 - _.x")
def test_every_tag_becomes_a_name_that_mlflow_accepts(tag: str) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import (
        _validate_metric_name,
        _validate_param_name,
        _validate_tag_name,
    )

    name = name_for(tag)
    for validate in (_validate_metric_name, _validate_param_name, _validate_tag_name):
        validate(name)
    assert 0 < len(name) <= 250
    try:
        _validate_metric_name(tag)
    except MlflowException:
        return
    # whose check ends in $, which passes over such a newline
    is_good = len(tag) <= 250 and not tag.endswith("\n")
    assert name == tag or not is_good, "a name that is good stays as it is"


def record(
    folder: str, *, uri: str | None = None, **config: object
) -> tuple[str, str, dict[str, str]]:
    """Record one launch in `folder`. Return the run's status, its id and its tags."""
    Path(folder, "config.yaml").write_text(
        yaml.safe_dump({"seed": 1, "name": "x" * 9000, "lists": [1], **config})
    )
    logger = MlflowLogger(MlflowConfig(tracking_uri=uri), Path(folder))
    logger.start(0)
    logger.scalars({"epoch": 0, "a@b": 1.5, "nan": float("nan"), "text": "t" * 9000}, 1)
    logger.text("config", "# é", 0)
    logger.close()
    run = logger.connect().get_run(logger.run_id)
    assert run.data.metrics["a_b"] == 1.5
    assert len(run.data.params["name"]) == len(run.data.tags["text"]) == 500
    return run.info.status, run.info.run_id, run.data.tags


def record_in_many_ways(folder: str) -> None:
    """Record in the local database, with another config, after the run was deleted, and where the
    variable says.
    """
    from mlflow import MlflowClient

    rank = read_environment().rank
    run_dir = Path(folder, f"run{rank}")
    run_dir.mkdir()
    status, first, _ = record(str(run_dir))
    assert status == "KILLED", "there were no results"
    assert (run_dir / "mlflow_run_id").read_text().strip() == first
    _, again, tags = record(str(run_dir), seed=2)
    assert (again, tags["seed"]) == (first, "2")

    for content in (b"", b"\xff", b"0" * 32):
        (run_dir / "mlflow_run_id").write_bytes(content)
        _, other, _ = record(str(run_dir))
        assert other != first
        assert (run_dir / "mlflow_run_id").read_text().strip() == other
    MlflowLogger(MlflowConfig(), run_dir).connect().delete_run(other)
    assert record(str(run_dir))[1] != other

    with (
        sqlite3.connect(f"{folder}/mlflow.db") as local,
        sqlite3.connect(f"{folder}/{rank}.db") as copy,
    ):
        local.backup(copy)  # a new database takes seconds
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/{rank}.db"
    os.chdir(folder)  # MLflow puts artifacts there
    _, last, tags = record(str(run_dir), seed=3)
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    assert (tags["seed"], "seed" in client.get_run(last).data.tags) == ("3", False)
    record(str(run_dir), uri=f"sqlite:///{folder}/mlflow.db", seed=4)
    assert client.get_run(last).data.tags["seed"] == "4"


def test_two_runs_share_a_new_database_and_continue_what_they_find(tmp_path: Path) -> None:
    folder = tmp_path / "é 100% #1"
    folder.mkdir()
    (folder / ".mlflow.db.writing").write_bytes(b"of a run that was killed")
    on_ranks(2, record_in_many_ways, str(folder))
    assert not (folder / ".mlflow.db.writing").exists()
