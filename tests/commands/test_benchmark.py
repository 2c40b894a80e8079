"""``benchmark``: every strategy side by side, those of plug-ins included; the table, the JSON file and the picture."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, compose, launch, on_ranks

from ddp_trainer import registry
from ddp_trainer.commands.step_benchmark import build_strategy_runs
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.training.start import start

PLUGIN = """
from dataclasses import dataclass

from ddp_trainer.config.sync import AllReduceConfig, SyncConfig
from ddp_trainer.registry import register_sync


@dataclass(kw_only=True, slots=True)
class HomemadeConfig(SyncConfig):
    name: str = "homemade"


@register_sync("homemade", HomemadeConfig)
def build(config, world):
    from ddp_trainer.sync.allreduce import AllReduceSync

    return AllReduceSync(AllReduceConfig(), world)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "homemade.py").write_text(PLUGIN)
    done = launch("benchmark", "rounds=2", "steps=8", *TINY, f"output_dir={folder}", "name=run", ranks=2, deadline=240,
                  DDP_TRAINER_PLUGINS="homemade", PYTHONPATH=str(folder))  # fmt: skip
    assert done.code == 0, done.output
    (folder / "output").write_text(done.output)
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "benchmark-run/benchmark.json").read_text())


@pytest.fixture(scope="module")
def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["rows"]}


def test_every_registered_strategy_is_compared_or_left_out_with_the_reason(
    result: dict[str, Any], rows: dict[str, Any], folder: Path
) -> None:
    strategies = {name.partition(",")[0] for name in (*rows, *result["left_out"])}
    assert strategies == {*registry.choices("sync"), "homemade"}
    assert list(result["left_out"]) == ["data_parallel"]
    assert "left out: sync=data_parallel is for one process with GPUs" in (folder / "output").read_text()


def test_variants_of_a_strategy_are_compared(rows: dict[str, Any]) -> None:
    assert {"ddp", "ddp, bf16 hook", "ddp, powersgd", "allreduce, flat", "allreduce, parameter", "parameter_server, 1",
            "parameter_server, 2"} < rows.keys()  # fmt: skip


def test_the_phases_of_a_step_add_up(rows: dict[str, Any]) -> None:
    for row in rows.values():
        assert len(row["images_per_second_by_round"]) == 2
        assert sum(row["phases_ms"].values()) == pytest.approx(row["step_ms"], rel=0.2)
        assert row["relative_min"] <= row["relative"] <= row["relative_max"]
    assert rows["ddp"]["relative"] == 1


def test_at_least_the_expected_bytes_were_sent(rows: dict[str, Any]) -> None:
    """Other processes may use the loopback interface too, so only the lower bound is certain."""
    for row in rows.values():
        assert row["sent_bytes"] >= 0.99 * (row["expected_sent_bytes"] or 0)
    parameters = rows["ddp"]["expected_sent_bytes"]  # 2 · (W − 1) / W · m is m for two ranks
    assert rows["ddp, fp16 hook"]["expected_sent_bytes"] == parameters / 2
    assert rows["ring"]["expected_sent_bytes"] == rows["parameter_server, 1"]["expected_sent_bytes"] == parameters
    assert rows["replicas"]["expected_sent_bytes"] == rows["none"]["expected_sent_bytes"] == 0
    assert rows["homemade"]["expected_sent_bytes"] is None


def test_the_table_and_the_picture_are_there(folder: Path) -> None:
    output = (folder / "output").read_text()
    assert "parameter_server, 2" in output
    [line] = [line for line in output.splitlines() if "homemade" in line]
    assert line.count("–") == 3  # the range of rounds, and two sizes that are unknown
    assert (folder / "benchmark-run/benchmark.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategies=rung"], "strategies=rung is not a valid choice: choose from ddp,"),
        (["strategies=ddp,data_parallel"], "sync=data_parallel is for one process with GPUs"),
        (["steps=0"], "steps=0 must be greater than 0"),
        (["rounds=few"], "rounds=few is not valid"),
        (["stepps=3"], "stepps=3 is unknown"),
        (["--steps=3"], "--steps=3 is not a flag"),
        (["model=lenett"], "model=lenett is not a valid choice"),
    ],
)
def test_a_mistake_is_one_error(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = launch("benchmark", *TINY, *arguments, f"output_dir={tmp_path}")
    assert done.code == 2
    assert done.output.startswith("error: ")
    assert message in done.output
    assert done.output.count("\n") == 1


def strategies_in_fp16() -> tuple[list[str], list[str]]:
    """Return the strategies that can run, and those that are left out."""
    with ExitStack() as stack:
        begun = start(compose(*TINY, "precision=fp16"), read_environment(), stack)
        runs, left_out = build_strategy_runs(begun, ["ddp", "local_sgd", "parameter_server"])
        names = [run.name for run in runs]
        del runs  # no DDP module may outlive the process group
    return names, list(left_out)


def test_strategies_that_do_not_support_the_precision_are_left_out() -> None:
    [(names, left_out)] = on_ranks(1, strategies_in_fp16)
    assert {name.partition(",")[0] for name in names} == {"ddp"}
    assert sorted(left_out) == ["local_sgd", "parameter_server, 1"]
