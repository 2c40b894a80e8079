"""``report`` of runs that were really trained, and ``report=true``."""

import json
from pathlib import Path

import pytest
from processes import launch, on_ranks
from runs import TINY, records, train_on

from ddp_trainer.commands import evaluate, report


def test_a_run_that_diverged_says_so_in_its_metrics_and_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = launch(
        *TINY, "optimizer.lr=1e30", "log_every_steps=100", f"output_dir={tmp_path}", "name=run"
    )
    assert done.code == 1, done.output
    last = records(tmp_path / "run", "train/loss")[-1]
    assert last["train/loss"] in ("nan", "inf")
    report.main([str(tmp_path / "run")])
    assert "report.html" in capsys.readouterr().out
    assert (
        f"The training diverged at step {last['step']}"
        in (tmp_path / "run/report.html").read_text()
    )


def test_the_end_of_a_run_leaves_the_scores_of_evaluate_and_a_report(tmp_path: Path) -> None:
    words = (*TINY, "report=true", f"output_dir={tmp_path}", "name=run")
    train_on(2, *words, "max_steps=3")
    first = (tmp_path / "run/report.html").read_text()
    train_on(3, *words)
    folder = tmp_path / "run/evaluation/last-test"
    by_training = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    on_ranks(2, evaluate.main, [str(tmp_path / "run"), "checkpoint=last"])
    by_command = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    metrics = [json.loads(files.pop("metrics.json")) for files in (by_training, by_command)]
    mistakes = [json.loads(files.pop("mistakes.json")) for files in (by_training, by_command)]
    assert by_training == by_command  # the matrix and all pictures
    assert [mistake["id"] for mistake in mistakes[0]] == [mistake["id"] for mistake in mistakes[1]]
    assert metrics[0].keys() == metrics[1].keys()
    for key in (
        "top1",
        "top5",
        "count",
        "step",
        "epoch",
        "split",
        "data",
        "checkpoint",
        "per_class",
    ):
        assert metrics[0][key] == metrics[1][key], key
    assert first != (tmp_path / "run/report.html").read_text()
    launches = [
        record["launch/world_size"] for record in records(tmp_path / "run", "launch/world_size")
    ]
    assert launches == [2, 3]
