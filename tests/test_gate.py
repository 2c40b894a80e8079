"""The gate of CI, run on small projects with a Makefile and tests of their own."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Finished, processes_with, run_command, start_command, wait_for

GATE = Path(__file__).resolve().parents[1] / ".ci" / "gate.py"
MAKEFILE = """\
.PHONY: check test chaos cluster-parallel cluster-alone
check:
	test ! -e bad_style
test chaos cluster-parallel cluster-alone:
	{python} -m pytest -p xdist -n 1 $@ $(PYTEST_OPTIONS)
"""
PASSES = "def test_that_passes():\n    pass\n"
FAILS = "def test_that_fails():\n    assert 1 == 2, 'one is not two'\n"
FAILS_ONCE = """\
from pathlib import Path
import pytest
@pytest.mark.parametrize("number", range({number}))
def test_that_fails_once(number, tmp_path_factory):
    mark = Path(f"failed-{{number}}")
    if not mark.exists():
        mark.touch()
        raise TimeoutError("waited in vain")
"""
KILLS_WORKER = "import os\ndef test_that_ends_the_worker():\n    os._exit(1)\n"
IMPORTED_ONCE = """\
from pathlib import Path
if not Path("imported").exists():
    Path("imported").touch()
    raise OSError("no space left")
"""
IS_COUNTED = """\
def test_that_is_counted():
    with open("count", "a") as file:
        file.write("1")
"""
BREAKS_PYTEST = """\
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if report.nodeid.startswith("chaos") and hasattr(report, "node"):  # not in a worker
        raise OSError("no space left")
"""
HANGS = """\
import time
from pathlib import Path
def test_that_hangs():
    Path("hangs").touch()
    time.sleep(600)
"""

LEAVES = """\
import os, subprocess, time
from pathlib import Path
def test_that_leaves_something_if_it_is_killed(tmp_path):
    if Path("left").exists():
        return
    folder = os.environ["GATE_FOLDER"]
    (tmp_path / "a disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path / "a disk"], check=True)
    subprocess.run(["ip", "netns", "add", Path(folder).name + "-host"], check=True)
    sleep = ["env", "-i", "sleep", "600"]
    log = (tmp_path / "log").open("w")
    left = [
        subprocess.Popen(sleep[2:], start_new_session=True),
        subprocess.Popen(sleep, cwd=tmp_path, start_new_session=True),
        subprocess.Popen(sleep, cwd="/", stdout=log, start_new_session=True),
    ]
    Path("left.part").write_text(" ".join([folder, *(str(process.pid) for process in left)]))
    Path("left.part").rename("left")
    time.sleep(600)
"""


def gate(folder: Path, *, max_seconds: int = 300, **tests: str) -> list[str]:
    """Write the tests of each stage to `folder`, by default one that passes; return the command."""
    (folder / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (folder / "pytest.ini").write_text("[pytest]\n")
    for stage in ("test", "chaos", "cluster-parallel", "cluster-alone"):
        (folder / stage).mkdir()
        text = tests.get(stage.replace("-", "_"), PASSES)
        (folder / stage / f"test_{stage.replace('-', '_')}.py").write_text(text)
    options = [f"--record={folder / 'record'}", f"--max-seconds={max_seconds}"]
    return [sys.executable, str(GATE), *options]


def run_gate(folder: Path, **options: Any) -> Finished:
    return run_command(gate(folder, **options), cwd=folder, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def list_at_the_end(done: Finished) -> list[str]:
    lines = done.output.partition("--- result\n")[2].splitlines()
    assert 0 < len(lines) <= 60
    return lines


def test_every_stage_runs_and_every_failure_is_listed(tmp_path: Path) -> None:
    (tmp_path / "bad_style").touch()
    done = run_gate(tmp_path, test=FAILS + PASSES, chaos=KILLS_WORKER, cluster_parallel="")
    lines = list_at_the_end(done)
    assert done.code == 1
    assert [line.partition(":")[0] for line in lines[:5]] == [
        "check",
        "test",
        "chaos",
        "cluster-parallel",
        "cluster-alone",
    ]
    assert "1 passed, 0 failed, 0 unsteady, 0 skipped" in lines[4]
    failed = [line for line in lines if line.startswith("failed: ")]
    assert len(failed) == 4
    assert failed[0].startswith("failed: check: exit code 2")
    assert failed[1].startswith(
        "failed: test: test/test_test.py::test_that_fails: AssertionError: one is not two"
    )
    assert failed[2].startswith("failed: chaos: ")
    assert "test_that_ends_the_worker" in failed[2]
    assert failed[3].startswith("failed: cluster-parallel: exit code 2 without a failed test")
    assert any(line.startswith("check | ") and "bad_style" in line for line in lines)
    assert lines[-1] == "2 passed, 4 failed, 0 skipped"


@pytest.mark.parametrize(("number", "code"), [(5, 0), (6, 1)])
def test_unsteady_tests_are_listed_and_more_than_five_are_refused(
    number: int, code: int, tmp_path: Path
) -> None:
    done = run_gate(tmp_path, chaos=FAILS_ONCE.format(number=number))
    lines = list_at_the_end(done)
    assert done.code == code, done.output
    unsteady = [line for line in lines if line.startswith("unsteady: chaos: ")]
    assert len(unsteady) == number
    assert all("passed alone in" in line for line in unsteady)
    assert all(line.endswith("TimeoutError: waited in vain") for line in unsteady)
    assert f"failed: {number} tests are unsteady, at most 5 may be" in lines or code == 0
    assert lines[-1] == f"{number + 3} passed, 0 failed, 0 skipped"


def test_a_stage_that_hangs_is_ended_and_the_list_is_printed(tmp_path: Path) -> None:
    done = run_gate(tmp_path, max_seconds=4, test=HANGS)
    lines = list_at_the_end(done)
    assert done.code == 1
    assert any("the time of all stages is over" in line for line in lines), done.output


def test_a_test_file_that_could_not_be_imported_is_red_though_it_passes_alone(
    tmp_path: Path,
) -> None:
    """Pytest runs no other test of the stage then."""
    done = run_gate(tmp_path, test=IMPORTED_ONCE + PASSES)
    lines = list_at_the_end(done)
    assert done.code == 1
    failed = [line for line in lines if line.startswith("failed: test: test/test_test.py")]
    assert len(failed) == 1
    assert failed[0].endswith("collection failure: E   OSError: no space left")


def test_a_stage_whose_pytest_breaks_is_red_and_not_run_again_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(BREAKS_PYTEST)
    done = run_gate(tmp_path, test=FAILS, chaos=IS_COUNTED)
    lines = list_at_the_end(done)
    assert done.code == 1
    assert any(line.startswith("failed: chaos: None::internal: internal error") for line in lines)
    assert (tmp_path / "count").read_text() == "1"


def test_the_list_has_at_most_60_lines(tmp_path: Path) -> None:
    fails = "import pytest\n@pytest.mark.parametrize('number', range(30))\n" + FAILS.replace(
        "()", "(number)"
    )
    (tmp_path / "bad_style").touch()
    empty = {"chaos": "", "cluster_parallel": "", "cluster_alone": ""}
    lines = list_at_the_end(run_gate(tmp_path, test=fails, **empty))
    assert "14 more are not listed" in lines  # 30 tests and 4 stages; 20 are listed
    assert lines[-1] == "0 passed, 34 failed, 0 skipped"


def test_a_gate_that_is_terminated_leaves_no_process(tmp_path: Path) -> None:
    mark = f"GATE_OF_TEST={tmp_path}"
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GATE_OF_TEST": str(tmp_path)}
    process = start_command(gate(tmp_path, test=HANGS), cwd=tmp_path, **variables)
    wait_for((tmp_path / "hangs").exists)
    process.terminate()
    process.communicate(timeout=90)
    wait_for(lambda: not processes_with(mark))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
def test_a_gate_removes_what_one_that_was_killed_has_left(tmp_path: Path) -> None:
    command = gate(tmp_path, test=LEAVES)
    options: Any = {"cwd": tmp_path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    first = start_command(command, **options)
    wait_for((tmp_path / "left").exists)
    name, *pids = (tmp_path / "left").read_text().split()
    folder = Path(name)

    second = run_command(command, **options)
    assert second.code == 1
    assert second.output.splitlines() == [
        f"error: .ci/run is running on this machine already, as process {first.pid}"
    ]

    first.kill()
    third = run_command(command, **options)
    first.communicate()
    assert third.code == 0, third.output
    assert " processes, 1 mounts, 1 namespaces" in third.output
    assert not processes_with(f"GATE_FOLDER={folder}")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    assert not Path(f"/run/netns/{folder.name}-host").exists()
    assert not folder.exists()
    assert third.output.count("removed what was left") == 1, "the third run has left something"
