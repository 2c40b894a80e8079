"""The doctor on this host: alone, as the ranks of a job, and where it has to say no."""

from __future__ import annotations

from pathlib import Path

from conftest import launch, on_ranks

from ddp_trainer.distributed import connected
from ddp_trainer.doctor import clock_row, compose_config, examine, verdict, version_row
from ddp_trainer.environment import read_environment


def test_the_doctor_alone_says_ready(tmp_path: Path) -> None:
    done = launch(f"output_dir={tmp_path}", module="ddp_trainer.doctor")
    assert done.code == 0, done.output
    assert done.output.endswith("ready: 1 rank can train here\n")
    assert list(tmp_path.iterdir()) == []


def examined(folder: str) -> tuple[list[str], str]:
    config = compose_config([f"output_dir={folder}"])
    environment = read_environment()
    with connected(config, environment) as world:
        rows = examine(world, environment, run_dir=Path(folder), size_mb=1)
        return [row.what for row in rows], verdict(rows, world)


def test_ranks_come_to_one_verdict(tmp_path: Path) -> None:
    first, second = on_ranks(2, examined, str(tmp_path))
    assert first == second
    assert {"all-reduce, latency", "all-reduce, bandwidth", "clocks"} <= set(first[0])
    assert first[1].endswith("ready: 2 ranks can train here")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    done = launch("output_dir=/proc/none", module="ddp_trainer.doctor")
    assert done.code == 2, done.output
    assert "error: /proc cannot be written (" in done.output
    assert "ready" not in done.output


def test_a_bad_setting_is_one_error() -> None:
    done = launch("optimiser=sgd", module="ddp_trainer.doctor")
    assert (done.code, done.output) == (2, "error: optimiser=sgd is unknown: did you mean optimizer?\n")


def test_versions_that_differ_are_an_error() -> None:
    ranks = [
        {"host": f"node{n}", "versions": {"Python": "3.11", "torch": torch}} for n, torch in enumerate(["2.14", "2.13"])
    ]
    row = version_row(ranks)
    assert (row.fatal, row.advice) == (True, "node1 has torch 2.13, other than rank 0: install the same on all nodes")
    assert not version_row(ranks[:1]).advice


def test_a_clock_is_minded_from_a_second_and_an_error_from_five() -> None:
    ranks = [{"host": "node0"}, {"host": "node1"}]
    rows = [clock_row([0.0, offset], ranks) for offset in (0.9, -1.1, 5.1)]
    assert [(bool(row.advice), row.fatal) for row in rows] == [(False, False), (True, False), (True, True)]
