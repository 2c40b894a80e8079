"""observer=[profiler]."""

import json
from pathlib import Path

import pytest
from conftest import memory_disk
from processes import start_ranks, wait_for
from runs import (
    TINY,
    assert_bitwise,
    compose,
    newest_checkpoint,
    newest_step,
    train,
    train_on,
)


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_trace_has_the_steps_and_does_not_change_the_training(
    all_ranks: bool, tmp_path: Path
) -> None:
    words = (*TINY, f"output_dir={tmp_path}")
    profiler = (
        "observer=[profiler]",
        "observer.profiler.first_step=3",
        "observer.profiler.steps=2",
        f"observer.profiler.all_ranks={all_ranks}",
    )
    train_on(2, *words, "name=plain")
    train_on(2, *words, *profiler, "name=traced")
    plain, traced = (newest_checkpoint(tmp_path / name) for name in ("plain", "traced"))
    assert_bitwise(plain["model"], traced["model"])
    files = sorted((tmp_path / "traced/profile").iterdir())
    assert [file.name for file in files] == [f"rank-{rank}.json" for rank in range(1 + all_ranks)]
    for file in files:
        events = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
        assert sum(name == "Optimizer.step#SGD.step" for name in events) == 2
        assert any("convolution_backward" in str(name) for name in events)


def test_a_launch_that_ends_before_the_last_step_writes_what_it_has(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "observer=[profiler]")
    train_on(1, *words, "observer.profiler.first_step=16", "observer.profiler.steps=9")
    assert json.loads((tmp_path / "run/profile/rank-0.json").read_text())["traceEvents"]


def test_a_link_that_appears_in_the_training_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "epochs=100", "observer=[profiler]")
    words = (*words, "observer.profiler.first_step=799", "observer.profiler.steps=9")
    [process] = start_ranks(1, train, compose(*words))
    wait_for((tmp_path / "run/metrics.jsonl").exists)
    (tmp_path / "run/profile").symlink_to(outside)
    process.join(60)
    assert process.exitcode == 0
    assert not list(outside.iterdir())
    log = (tmp_path / "run/train.log").read_text()
    assert f"Not a directory: '{tmp_path}/run/profile'" in log


def test_a_full_disk_is_named_and_costs_no_checkpoint(tmp_path: Path) -> None:
    with memory_disk(tmp_path / "disk", "size=3m") as disk:
        words = (*TINY, f"output_dir={disk}", "name=run", "observer=[profiler]")
        train_on(1, *words, "checkpoint.keep_last=1", "epochs=20", "observer.profiler.steps=150")
        assert newest_step(disk / "run") == 160
        assert not list((disk / "run/profile").iterdir())
        assert "rank-0.json was not written" in (disk / "run/train.log").read_text()
