"""Flight data and memory that grows: what ranks know about themselves is kept and warned about."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import launch
from runs import TINY

from ddp_trainer.observers.ranks import Ranks, growing_rank
from ddp_trainer.observers.step_times import StepTimer

LEAKING = str(Path(__file__).with_name("leaking.py"))


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.fault("a job that fails loses what its ranks have measured")
def test_a_job_that_fails_leaves_the_flight_data_of_its_ranks(tmp_path: Path) -> None:
    words = [*TINY, "epochs=100", f"output_dir={tmp_path}", "name=run", "log_every_steps=2"]
    done = launch(*words, ranks=2, script=LEAKING, FAILING="1:21")
    assert done.code == 1, done.output
    for rank in (0, 1):
        found = rows(tmp_path / f"run/flight/rank-{rank:05}.jsonl")
        assert found[-1]["step"] == 20, done.output
        assert all(row["backward"] > 0 and row["memory_mb"] > 50 for row in found)
        assert sum(row["steps"] for row in found) == 20


def test_memory_that_grows_in_every_epoch_is_warned_about_once(tmp_path: Path) -> None:
    words = [*TINY, "epochs=14", f"output_dir={tmp_path}", "name=run"]
    done = launch(*words, ranks=2, script=LEAKING, LEAKING="1:20")
    assert done.code == 0, done.output
    [line] = re.findall(
        r"^the memory of rank 1 on \S+ has grown in each of the last 10 epochs, from .*$",
        done.output,
        re.M,
    )
    before, after = (
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+)(?: to| MiB)", line)[-2:]
    )
    assert after - before >= 64
    assert not (tmp_path / "run/flight").exists()


def test_a_disk_that_is_full_loses_the_flight_data_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "flight").write_text("not a folder")
    observer = Ranks(StepTimer(torch.device("cpu"), torch.nn.Linear(1, 1)))
    observer.rows.append({"step": 1})
    run: Any = SimpleNamespace(run_dir=tmp_path, world=SimpleNamespace(rank=0))
    observer.on_failure(run)


def test_an_evaluation_before_the_first_log_point_is_not_compared() -> None:
    """After the loss of a rank, an evaluation may be the first thing that this process does."""
    observer = Ranks(StepTimer(torch.device("cpu"), torch.nn.Linear(1, 1)))
    run: Any = SimpleNamespace(world=SimpleNamespace(is_main=True))
    observer.on_evaluation(run)
    for _ in range(11):
        observer.memory_mb = torch.tensor([500.0, 500.0])
        observer.on_evaluation(run)


def growing(levels: list[list[float]]) -> int | None:
    return growing_rank(torch.tensor(levels, dtype=torch.float64))


def test_growth_is_that_of_every_epoch_and_large_enough() -> None:
    assert growing([[500.0, 500.0 + 20 * epoch] for epoch in range(6)]) == 1
    assert growing([[500.0, 500.0 + 10 * epoch] for epoch in range(6)]) is None  # less than 64 MB
    # less than a tenth
    assert growing([[5000.0, 5000.0 + 20 * epoch] for epoch in range(6)]) is None
    # not in every epoch
    assert growing([[500.0, 500.0 + 60 * (epoch // 2)] for epoch in range(6)]) is None
    assert growing([[500.0 * 2**epoch, 400.0] for epoch in range(6)]) == 0
