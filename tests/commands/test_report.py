"""``report`` of runs that were really trained, and ``report=true``."""

import json
import os
import re
from pathlib import Path

import pytest
from processes import launch, on_ranks
from runs import TINY, records, train_on

from ddp_trainer.commands import evaluate, freeze, report
from ddp_trainer.output import output_file
from ddp_trainer.tools.report.page import write_report


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


def test_the_report_of_a_sweep_names_its_jobs_by_what_differs(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "name=sweep", "report=true")
    done = launch(*words, "optimizer.lr=0.02,0.01", "--multirun")
    assert done.code == 0, done.output
    report.main([str(tmp_path / "sweep")])
    page = (tmp_path / "sweep/report.html").read_text()
    heads = re.findall('<th scope="row"><span class="run">.*?<bdi>(.*?)</bdi>', page)
    assert sorted(heads) == ["optimizer.lr=0.01", "optimizer.lr=0.02"]  # the folders have a hash
    assert "F1 of each class · test, the most changed first" in page
    shown = re.sub(r"data:image/png;base64,[\w+/=]+|nonce[=-]\S+", "", page)
    assert re.findall(r"\d[\d.]{13,}", shown) == []


def test_reports_may_be_written_at_the_same_time(tmp_path: Path) -> None:
    train_on(1, *TINY, f"output_dir={tmp_path}", "name=run", "max_steps=2")
    on_ranks(4, write_reports, [tmp_path / "run"], tmp_path / "run/report.html")
    assert (tmp_path / "run/report.html").read_text().rstrip().endswith("</html>")
    assert not list((tmp_path / "run").glob(".*.writing"))


def test_a_file_that_another_process_has_just_created_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    is_file = os.path.isfile

    def is_file_then_created(path: Path) -> bool:
        found = is_file(path)
        Path(path).touch()
        return found

    monkeypatch.setattr(os.path, "isfile", is_file_then_created)
    with output_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


def write_reports(run_dirs: list[Path], output: Path) -> None:
    for _ in range(10):
        write_report(run_dirs, output)


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


def test_a_report_and_a_job_file_replace_only_their_own_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    config = tmp_path / "run/config.yaml"
    config.write_text("name: run\n")
    mine = tmp_path / "mine"
    for main, words in (
        (report.main, [str(tmp_path / "run"), "output={}"]),
        (freeze.main, ["{}", "model=lenet"]),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([word.format(config) for word in words])
        assert (
            f"error: {config} does not look like a file of this command" in capsys.readouterr().err
        )
        assert config.read_text() == "name: run\n"
        mine.write_text("")  # as mktemp does
        for _ in range(2):
            main([word.format(mine) for word in words])
        mine.unlink()
