"""``doctor`` on this host: alone, as the ranks of a job, and where a run could not train."""

import re
from pathlib import Path

from processes import launch, on_ranks, succeed
from runs import in_process_group

from ddp_trainer.launchers import fitness
from ddp_trainer.tools.doctor import Finding, examine, merge_finding


def test_a_single_process_is_ready(tmp_path: Path) -> None:
    done = succeed("doctor", f"output_dir={tmp_path}")
    assert done.output.endswith("ready: 1 rank can train here\n")
    assert list(tmp_path.iterdir()) == []


def examined(folder: str) -> list[Finding]:
    fitness.SECONDS = 0.2
    with in_process_group() as world:
        return examine(world, run_dir=Path(folder), size_mib=1)


def test_ranks_are_examined_together(tmp_path: Path) -> None:
    first, second = on_ranks(2, examined, str(tmp_path))
    names = [finding.name for finding in first]
    assert {"versions", "disk", "all-reduce, latency", "all-reduce, bandwidth"} <= set(names)
    values = [finding.value for finding in first]
    assert not any(re.search("MB|GB a", value) for value in values), "sizes are counted in MiB"
    assert [name for name in names if name != "disk"] == [finding.name for finding in second]


QUICK = """
from ddp_trainer import __main__
from ddp_trainer.launchers import fitness

fitness.SECONDS = 0.2
__main__.main()
"""


def test_what_keeps_a_run_from_training_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(QUICK)
    (tmp_path / "file").touch()
    for folder, name in ("/proc/none", "/proc"), (f"{tmp_path}/file/x", f"{tmp_path}/file"):
        done = launch("doctor", f"output_dir={folder}", script=str(tmp_path / "quick.py"))
        assert done.code == 2, done.output
        assert f"error: {name} cannot be written (" in done.output
        assert "ready" not in done.output


def test_values_of_nodes_that_differ_are_listed() -> None:
    alike = {f"node{n}": Finding("cores", "8 cores") for n in range(2)}
    assert merge_finding(alike) == Finding("cores", "8 cores")
    different = alike | {"node2": Finding("cores", "1 core", "start fewer ranks")}
    values = "node0: 8 cores; node1: 8 cores; node2: 1 core"
    assert merge_finding(different) == Finding("cores", values, "node2: start fewer ranks")
