"""All strategies side by side: the table, the numbers as JSON, the picture, and the bytes against the textbook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, compose, launch

from ddp_trainer.benchmark import combined
from ddp_trainer.config import (
    AllReduceConfig,
    CommHook,
    DDPConfig,
    LocalSGDConfig,
    NoSyncConfig,
    ParameterServerConfig,
    RingConfig,
)
from ddp_trainer.costs import factor_elements, traffic

STEPS = 8
PNG = b"\x89PNG\r\n\x1a\n"
MODULE = "ddp_trainer.benchmark"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    done = launch("--rounds=2", f"--steps={STEPS}", *TINY, f"output_dir={folder}", "name=run",
                  ranks=2, module=MODULE, deadline=240)  # fmt: skip
    assert done.code == 0, done.output
    (folder / "said").write_text(done.output)
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "benchmark-run/benchmark.json").read_text())["rows"]
    return {entry["name"]: entry for entry in found}


def test_every_strategy_that_can_run_here_is_compared(rows: dict[str, Any]) -> None:
    assert list(rows) == [
        "ddp", "ddp, bf16 hook", "ddp, fp16 hook", "ddp, powersgd", "allreduce, flat", "allreduce, parameter",
        "local_sgd", "replicas", "ring", "parameter_server, 1", "parameter_server, 2",
    ]  # fmt: skip


def test_the_phases_of_a_step_add_up(rows: dict[str, Any]) -> None:
    for entry in rows.values():
        assert len(entry["images_per_second_all"]) == 2
        assert sum(entry["phases_ms"].values()) == pytest.approx(entry["step_ms"], rel=0.2)
        assert entry["relative_least"] <= entry["relative"] <= entry["relative_most"]
    assert rows["ddp"]["relative"] == 1


def test_at_least_what_the_textbook_says_was_sent(rows: dict[str, Any]) -> None:
    """Others may use the loopback meanwhile, so only the lower bound is certain."""
    for entry in rows.values():
        assert entry["sent_bytes"] >= 0.99 * entry["textbook_sent_bytes"]
    parameters = rows["ddp"]["textbook_sent_bytes"]  # 2 · (W − 1) / W · m is m for two ranks
    assert rows["ddp, fp16 hook"]["textbook_sent_bytes"] == parameters / 2
    assert rows["ring"]["textbook_sent_bytes"] == rows["parameter_server, 1"]["textbook_sent_bytes"] == parameters
    assert rows["replicas"]["textbook_sent_bytes"] == 0


def test_the_table_and_the_picture_are_there(folder: Path) -> None:
    assert "parameter_server, 2" in (folder / "said").read_text()
    assert (folder / "benchmark-run/benchmark.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategies=rung"], "--strategies=rung cannot be compared here: choose of allreduce, ddp"),
        (["--steps=0"], "--steps=0 must be at least 1"),
        (["--stepps=3"], "--stepps=3 is no flag"),
        (["model=lenett"], "model=lenett is unknown"),
    ],
)
def test_a_mistake_is_one_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = launch(*TINY, *arguments, f"output_dir={tmp_path}", module=MODULE)
    assert done.code == 2
    assert done.output.startswith("error: ")
    assert said in done.output


# --- the textbook -----------------------------------------------------------------------------

SHAPES = [(64, 32, 3, 3), (64,), (10, 64)]
BYTES = 4 * (64 * 32 * 9 + 64 + 640)


def test_what_does_not_go_with_the_precision_is_left_out() -> None:
    syncs = {"ddp": DDPConfig(), "local_sgd": LocalSGDConfig(), "parameter_server, 1": ParameterServerConfig()}
    assert combined(compose("precision=bf16"), syncs).keys() == syncs.keys()
    assert combined(compose("precision=fp16"), syncs).keys() == {"ddp"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 4096])
def test_an_all_reduce_sends_what_hardly_depends_on_the_number_of_ranks(ranks: int) -> None:
    expected = 2 * (ranks - 1) / ranks * BYTES
    for config in (DDPConfig(), AllReduceConfig(), RingConfig()):
        assert traffic(config, SHAPES, world_size=ranks).sent_per_rank == pytest.approx(expected)
    assert traffic(DDPConfig(comm_hook=CommHook.bf16), SHAPES, world_size=ranks).sent_per_rank * 2 == expected


def test_all_of_it_passes_through_one_server_and_a_share_of_it_through_many() -> None:
    assert traffic(ParameterServerConfig(), SHAPES, world_size=4).busiest == 2 * 3 * BYTES
    even = traffic(ParameterServerConfig(num_servers=4), SHAPES, world_size=4)
    assert even.busiest == 2 * even.sent_per_rank == pytest.approx(traffic(RingConfig(), SHAPES, world_size=4).busiest)


def test_local_sgd_divides_by_its_interval_and_pays_for_the_optimizer() -> None:
    found = traffic(LocalSGDConfig(every_steps=8), SHAPES, world_size=2, optimizer_slots=2)
    assert found.sent_per_rank == BYTES * 3 / 8
    assert traffic(NoSyncConfig(), SHAPES, world_size=1).sent_per_rank == 0


def test_powersgd_sends_factors_where_they_are_at_most_half() -> None:
    assert factor_elements((64, 32, 3, 3), 2) == (64 + 288) * 2
    assert factor_elements((64,), 2) == 64
    assert factor_elements((10, 64), 4) == 296
    assert factor_elements((10, 64), 5) == 640  # 370 twice is more than 640
