"""``doctor`` on this host: alone, as the ranks of a job, and where a run could not train."""

from pathlib import Path

from conftest import compose, in_process_group, launch, on_ranks

from ddp_trainer.commands.doctor import Finding, clock_finding, conclusion, examine, merge, versions_finding
from ddp_trainer.distributed.environment import read_environment


def test_a_single_process_is_ready(tmp_path: Path) -> None:
    done = launch("doctor", f"output_dir={tmp_path}")
    assert done.code == 0, done.output
    assert done.output.endswith("ready: 1 rank can train here\n")
    assert list(tmp_path.iterdir()) == []


def examined(folder: str) -> tuple[list[Finding], list[str]]:
    with in_process_group(compose(f"output_dir={folder}")) as world:
        findings = examine(world, read_environment(), run_dir=Path(folder), size_mb=1)
        return findings, conclusion(findings, num_ranks=world.world_size)


def test_ranks_come_to_the_same_findings(tmp_path: Path) -> None:
    first, second = on_ranks(2, examined, str(tmp_path))
    assert first == second
    findings, lines = first
    assert {"all-reduce, latency", "all-reduce, bandwidth", "clocks"} <= {finding.name for finding in findings}
    assert lines[-1] == "ready: 2 ranks can train here"


def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    done = launch("doctor", "output_dir=/proc/none")
    assert done.code == 2, done.output
    assert "error: /proc cannot be written (" in done.output
    assert "ready" not in done.output


def test_a_bad_setting_is_one_error() -> None:
    done = launch("doctor", "optimiser=sgd")
    assert (done.code, done.output) == (2, "error: optimiser=sgd is unknown: did you mean optimizer?\n")


def test_different_versions_are_an_error() -> None:
    ranks = [
        {"host": f"node{n}", "versions": {"Python": "3.11", "torch": torch}} for n, torch in enumerate(["2.14", "2.13"])
    ]
    finding = versions_finding(ranks)
    assert finding.advice == "node1 has torch 2.13, unlike rank 0: install the same on all nodes"
    assert finding.is_error
    assert not versions_finding(ranks[:1]).advice


def test_nodes_that_differ_are_listed() -> None:
    alike = {f"node{n}": Finding("cores", "8 cores") for n in range(2)}
    assert merge(alike) == Finding("cores", "8 cores")
    different = alike | {"node2": Finding("cores", "1 core", "start fewer ranks")}
    assert merge(different) == Finding(
        "cores", "node0: 8 cores; node1: 8 cores; node2: 1 core", "node2: start fewer ranks"
    )


def test_clocks_are_a_warning_from_one_second_and_an_error_from_five() -> None:
    rows = [
        clock_finding([{"host": "node0", "time": 100.0}, {"host": "node1", "time": time}])
        for time in (100.9, 98.9, 105.1)
    ]
    assert [(bool(row.advice), row.is_error) for row in rows] == [(False, False), (True, False), (True, True)]
    assert rows[1].advice.startswith("the clock of node1 differs by 1.1 s")
    assert conclusion([rows[1]], num_ranks=2) == [f"warning: {rows[1].advice}", "ready: 2 ranks can train here"]
