"""``doctor`` on this host: alone, as the ranks of a job, and where a run could not train."""

from pathlib import Path

from processes import launch, on_ranks, succeed
from runs import in_process_group

from ddp_trainer.launchers import fitness
from ddp_trainer.tools.doctor import Finding, clock_finding, examine, merge_finding


def test_a_single_process_is_ready(tmp_path: Path) -> None:
    done = succeed("doctor", f"output_dir={tmp_path}")
    assert done.output.endswith("ready: 1 rank can train here\n")
    assert list(tmp_path.iterdir()) == []


def examined(folder: str) -> list[Finding]:
    fitness.SECONDS = 0.2
    with in_process_group() as world:
        return examine(world, run_dir=Path(folder), size_mb=1)


def test_ranks_come_to_the_same_findings(tmp_path: Path) -> None:
    first, second = on_ranks(2, examined, str(tmp_path))
    assert first == second
    assert {"all-reduce, latency", "all-reduce, bandwidth", "clocks"} <= {
        finding.name for finding in first
    }
    assert not any(finding.is_error for finding in first)


def test_what_keeps_a_run_from_training_is_an_error() -> None:
    done = launch("doctor", "output_dir=/proc/none")
    assert done.code == 2, done.output
    assert "error: /proc cannot be written (" in done.output
    assert "ready" not in done.output


def test_nodes_that_differ_are_listed_and_must_have_the_same_versions() -> None:
    alike = {f"node{n}": Finding("cores", "8 cores") for n in range(2)}
    assert merge_finding(alike) == Finding("cores", "8 cores")
    different = alike | {"node2": Finding("cores", "1 core", "start fewer ranks")}
    values = "node0: 8 cores; node1: 8 cores; node2: 1 core"
    assert merge_finding(different) == Finding("cores", values, "node2: start fewer ranks")
    versions = merge_finding({f"node{n}": Finding("versions", f"torch 2.{n}") for n in range(2)})
    assert (
        versions.advice
        == "versions differ (node0: torch 2.0; node1: torch 2.1): install the same on all nodes"
    )
    assert versions.is_error


def test_clocks_are_a_warning_from_one_second_and_an_error_from_five() -> None:
    rows = [clock_finding({"node0": 0.0, "node1": seconds}) for seconds in (0.9, -1.1, 5.1)]
    assert [(bool(row.advice), row.is_error) for row in rows] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert rows[1].advice.startswith("the clock of node1 differs by 1.1 s")
