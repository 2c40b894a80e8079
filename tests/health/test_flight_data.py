"""Flight data and memory that grows: what ranks know about themselves is kept and warned about."""

import json
import re
from pathlib import Path

import pytest
import torch
from processes import run_command, torchrun
from runs import TINY

from ddp_trainer.observers.memory import Memory
from ddp_trainer.observers.ranks import write_flight_data

LEAKING = str(Path(__file__).with_name("leaking.py"))


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.fault("a job that fails loses what its ranks have measured")
def test_a_job_that_fails_leaves_the_flight_data_of_its_ranks(tmp_path: Path) -> None:
    words = [*TINY, "epochs=100", f"output_dir={tmp_path}", "name=run", "log_every_steps=2"]
    done = run_command([*torchrun(2), LEAKING, *words], FAILING="1:21")
    assert done.code == 1, done.output
    for rank in (0, 1):
        found = rows(tmp_path / f"run/flight/rank-{rank:05}.jsonl")
        assert found[-1]["step"] == 20, done.output
        assert all(row["backward"] > 0 and row["memory_mb"] > 50 for row in found)
        assert sum(row["steps"] for row in found) == 20


def test_memory_that_grows_in_every_epoch_is_warned_about_once(tmp_path: Path) -> None:
    words = [*TINY, "epochs=9", f"output_dir={tmp_path}", "name=run"]
    done = run_command([*torchrun(2), LEAKING, *words], LEAKING="1:20")
    assert done.code == 0, done.output
    [line] = re.findall(
        r"^the memory of rank 1 on \S+ has grown in each of the last 5 epochs, from .*$",
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
    write_flight_data(tmp_path, [{"step": 1}], rank=0)


def grown(levels: list[list[float]]) -> list[int | None]:
    memory = Memory()
    found = [
        memory.find_growth(torch.tensor(level, dtype=torch.float64), epoch)
        for epoch, level in enumerate(levels)
    ]
    return [one and one[0] for one in found]


def test_growth_is_that_of_every_epoch_and_large_enough() -> None:
    assert grown([[500.0, 500.0 + 20 * epoch] for epoch in range(8)]) == [None] * 6 + [1, None]
    assert not any(grown([[500.0, 500.0 + 10 * epoch] for epoch in range(8)]))  # less than 64 MB
    # less than a tenth
    assert not any(grown([[5000.0, 5000.0 + 20 * epoch] for epoch in range(8)]))
    # not in every epoch
    assert not any(grown([[500.0, 500.0 + 60 * (epoch // 2)] for epoch in range(12)]))
    assert grown([[500.0 * 2**epoch, 400.0] for epoch in range(14)]).count(0) == 2
