"""A run that is interrupted and resumed, read back from the files of wandb and mlflow by other
code than ours.
"""

import json
import os
import shutil
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rich
import yaml
from processes import on_ranks
from runs import compose, records

from ddp_trainer import run
from ddp_trainer.config.differences import flatten_keys
from ddp_trainer.observers.console import PACKAGE, logging_to

WORDS = (
    "model=lenet",
    "data=digits",
    "epochs=2",
    "precision=fp32",
    "log_every_steps=1",
    "name=run",
    "logger=[wandb,mlflow,jsonl]",
    "logger.wandb.mode=offline",
    "logger.wandb.tags=[one,two]",
)
BACK_TO = 5
"""The step of the checkpoint that the second launch resumes from; the first has recorded 7 steps,
and there are 10.
"""


def train(*words: str) -> list[str]:
    """Train as one rank. Return the clients that it has imported."""
    run(compose(*WORDS, *words))
    return sorted({"wandb", "mlflow"} & set(sys.modules))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on 2 ranks, stop, and resume on 1 rank."""
    folder = tmp_path_factory.mktemp("out put ü")
    words = f"output_dir='{folder}'"
    assert on_ranks(2, train, words, "max_steps=7") == [["mlflow", "wandb"], []]
    shutil.copy(folder / "run/metrics.jsonl", folder / "first_launch.jsonl")
    (folder / "run/checkpoints/step-00000007.pt").unlink()
    on_ranks(1, train, words)
    assert f"epoch 1, step {BACK_TO}" in (folder / "run/train.log").read_text()
    assert "WARNING" not in (folder / "run/train.log").read_text()
    return folder / "run"


def all_values(run_dir: Path, tag: str) -> list[tuple[int, Any]]:
    """Return (step, value) of both launches: metrics.jsonl drops the steps that are repeated, other
    clients cannot.
    """
    first = [
        json.loads(line)
        for line in (run_dir.parent / "first_launch.jsonl").read_text().splitlines()
    ]
    second = [record for record in records(run_dir) if record["time"] > first[-1]["time"]]
    values = [(record["step"], record[tag]) for record in [*first, *second] if tag in record]
    assert len(values) > 2
    return values


def test_a_closed_console_takes_no_line_from_the_log_file(tmp_path: Path) -> None:
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    rich.reconfigure(file=closed)
    try:
        with logging_to(tmp_path, rank=0):
            for text in ("first", "second"):
                PACKAGE.info(text)
    finally:
        rich.reconfigure()
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split()[3] for line in lines] == ["the", "first", "second"]


# --- wandb ----------------------------------------------------------------------------------------


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a run's transaction log.

    Source: github.com/google/leveldb/blob/main/doc/log_format.md; wandb's files begin with a header
    of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made when it is imported

    data = path.read_bytes()
    position = 7
    content = b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", data, position)
        content += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(content)
            content = b""


def wandb_launches(run_dir: Path) -> list[list[Any]]:
    """Return the records of each launch."""
    return [
        list(wandb_records(path)) for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    ]


def items(updates: Any) -> dict[str, Any]:
    """Return the values in a record of wandb by key."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}


def test_wandb_has_the_values_of_jsonl_over_the_optimizer_step(run_dir: Path) -> None:
    launches = wandb_launches(run_dir)
    rows = [
        items(record.history.item)
        for launch in launches
        for record in launch
        if record.HasField("history")
    ]
    for tag in ("train/loss", "eval/loss", "samples/digest", "epoch"):
        assert [(row["step"], row[tag]) for row in rows if tag in row] == all_values(run_dir, tag)
    metrics = [record.metric for record in launches[0] if record.HasField("metric")]
    assert ("*", "step") in [(metric.glob_name, metric.step_metric) for metric in metrics]


def test_wandb_continues_one_run_with_its_config_and_results(run_dir: Path) -> None:
    launches = wandb_launches(run_dir)
    runs = [next(record.run for record in launch if record.HasField("run")) for launch in launches]
    assert {run.run_id for run in runs} == {(run_dir / "run_id").read_text().strip()}
    assert [(run.display_name, run.project, run.host, list(run.tags)) for run in runs] == [
        ("run", "ddp_trainer", "", ["one", "two"])
    ] * 2
    config = items(runs[1].config.update)
    del config["_wandb"]
    assert config == yaml.safe_load((run_dir / "config.yaml").read_text())
    summary = [items(record.summary.update) for record in launches[1] if record.HasField("summary")]
    assert {"hparam/top1", "hparam/loss"} <= {key for update in summary for key in update}
    assert sorted(
        path.name.split("_")[0] for path in run_dir.glob("wandb/*/files/media/images/train/*")
    ) == ["first"]
    files = {
        path.name
        for folder in run_dir.glob("wandb/offline-run-*/files")
        for path in folder.iterdir()
    }
    assert files == {"media"}, "nothing of the host and of the user's files"


# --- mlflow ---------------------------------------------------------------------------------------


def mlflow_run(run_dir: Path) -> tuple[Any, Any]:
    """Return a client of the local database, and the run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("ddp_trainer")
    assert experiment is not None
    [only] = client.search_runs([experiment.experiment_id])
    return client, only


def test_mlflow_has_the_values_of_jsonl(run_dir: Path) -> None:
    client, only = mlflow_run(run_dir)
    for tag in ("train/loss", "eval/loss", "eval/top1"):
        history = [
            (metric.step, metric.value)
            for metric in client.get_metric_history(only.info.run_id, tag)
        ]
        assert history == all_values(run_dir, tag)
    assert only.data.metrics["hparam/top1"] == all_values(run_dir, "eval/top1")[-1][1]


def test_mlflow_continues_one_run_with_its_config_and_pictures(run_dir: Path) -> None:
    client, only = mlflow_run(run_dir)
    assert (only.info.run_name, only.info.status) == ("run", "FINISHED")
    config = flatten_keys(yaml.safe_load((run_dir / "config.yaml").read_text()))
    first_config = config | {"max_steps": 7}
    assert only.data.params == {key: str(value) for key, value in first_config.items()}
    assert [file.path for file in client.list_artifacts(only.info.run_id, "train/first_batch")] == [
        "train/first_batch/step-00000000.png"
    ]
    path = Path(
        only.info.artifact_uri.removeprefix("file://").replace("%20", " ").replace("%C3%BC", "ü")
    )
    assert (path / "train/first_batch/step-00000000.png").read_bytes().startswith(b"\x89PNG")
    assert (path / "config.yaml").read_text() == (run_dir / "config.yaml").read_text()
    with sqlite3.connect(run_dir.parent / "mlflow.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
