"""``plan``: measured on real ranks, or on one rank for a network that is given."""

import json
from pathlib import Path

from processes import succeed
from runs import TINY

from ddp_trainer.tools.costs import PREDICTED


def test_two_ranks_plan_for_more(tmp_path: Path) -> None:
    done = succeed(
        "plan",
        "ranks=1,2,4096",
        "steps=3",
        *TINY,
        f"output_dir={tmp_path}",
        "name=run",
        ranks=2,
        deadline=200,
    )
    assert "│ 4,096 " in done.output
    plan = json.loads((tmp_path / "plan-run/plan.json").read_text())
    predictions = {(p["strategy"], p["world_size"]): p for p in plan["predictions"]}
    assert predictions.keys() == {
        (strategy, ranks)
        for strategy in PREDICTED
        for ranks in (1, 2, 4096)
        if (strategy, ranks) != ("pipeline, 2", 1)
    }
    for strategy in PREDICTED:
        efficiencies = [
            predictions[strategy, ranks]["efficiency"]
            for ranks in (1, 2, 4096)
            if (strategy, ranks) in predictions
        ]
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert plan["network"]["latency"] > 0
    assert plan["compute"]["forward_backward"] > 0


def test_keys_of_the_training_that_one_rank_cannot_have(tmp_path: Path) -> None:
    """The compute time is that of one rank, with half of the batch and half of the shards."""
    words = ("recovery.min_ranks=2", "shards=12", f"output_dir={tmp_path}", "name=run")
    succeed("plan", "ranks=1,2", "steps=2", *TINY, *words, ranks=2, deadline=200)
    assert (tmp_path / "plan-run/plan.json").exists()


def test_one_rank_plans_for_a_network_that_is_given(tmp_path: Path) -> None:
    succeed(
        "plan",
        "ranks=1,8",
        "bandwidth_mbit=1000",
        "latency_us=50",
        "steps=2",
        *TINY,
        f"output_dir={tmp_path}",
        "name=run",
        deadline=200,
    )
    network = json.loads((tmp_path / "plan-run/plan.json").read_text())["network"]
    assert (network["latency"], network["bandwidth"]) == (50e-6, 125e6)
