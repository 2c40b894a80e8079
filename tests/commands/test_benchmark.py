"""``benchmark``: every strategy side by side, those of plug-ins included; table and JSON file."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import on_ranks, succeed
from runs import TINY, compose
from test_plugins import PLUGIN

from ddp_trainer import registry
from ddp_trainer.commands.results import write_results
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.start import set_up
from ddp_trainer.tools.costs import VARIANTS
from ddp_trainer.tools.step_benchmark import build_strategies

Rows = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Rows, dict[str, str]]:
    """Return the output of a benchmark, its rows by strategy, and the reasons why others were left
    out.
    """
    folder = tmp_path_factory.mktemp("benchmark")
    done = succeed(
        "benchmark",
        "rounds=2",
        "steps=8",
        *TINY,
        f"output_dir={folder}",
        "name=run",
        ranks=2,
        deadline=240,
        **PLUGIN,
    )
    result = json.loads((folder / "benchmark-run/benchmark.json").read_text())
    return done.output, {row["name"]: row for row in result["rows"]}, result["left_out"]


def test_every_registered_strategy_is_compared_or_left_out_with_the_reason(
    run: tuple[str, Rows, dict[str, str]],
) -> None:
    output, rows, left_out = run
    assert {name.partition(",")[0] for name in (*rows, *left_out)} == {
        *registry.choices("sync"),
        "reduce_broadcast",
    }
    assert list(left_out) == ["data_parallel"]
    assert "left out: sync=data_parallel is for one process with GPUs" in output
    assert {*VARIANTS, "parameter_server, 2"} < rows.keys()
    assert any("reduce_broadcast" in line for line in output.splitlines())


def test_the_phases_of_a_step_add_up(run: tuple[str, Rows, dict[str, str]]) -> None:
    _, rows, _ = run
    for row in rows.values():
        assert sum(row["phases_ms"].values()) == pytest.approx(row["step_ms"], rel=0.2)
        assert row["relative_min"] <= row["relative"] <= row["relative_max"]
    assert rows["ddp"]["relative"] == 1


def strategies_in_fp16() -> tuple[list[str], list[str]]:
    """Return the strategies that can run, and those that are left out."""
    with ExitStack() as stack:
        setup = set_up(compose(*TINY, "precision=fp16"), read_environment(), stack)
        runs, left_out = build_strategies(setup, [])
        names = list(runs)
        del runs  # no DDP module may outlive the process group
    return names, list(left_out)


def test_strategies_that_do_not_support_the_precision_are_left_out() -> None:
    [(names, left_out)] = on_ranks(1, strategies_in_fp16)
    assert {"local_sgd", "parameter_server, 1"} <= set(left_out)
    assert {name for name in VARIANTS if name.startswith("ddp")} <= set(names)


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"plan-run/plan\.json cannot be written: Not a directory"
    ):
        write_results({}, tmp_path / "file" / "run", name="plan")
