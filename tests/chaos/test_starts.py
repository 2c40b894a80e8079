"""Starts that go wrong: wrong variables, an interrupt, a rank that never comes, too little
memory.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import IS_FULL
from processes import launch, run_command, start_command, succeed, torchrun, wait_for
from runs import TINY, read_summary

ROOT = Path(__file__).parents[2]
FAULTY = str(Path(__file__).with_name("faulty.py"))
NODE = ["NNODES=1", "NODE_RANK=0", "HEAD=127.0.0.1", "NPROC=1"]
WRONG_VARIABLES = {
    "local.sh NPROC=0": "NPROC=0 must be a number of ranks",
    "local.sh NPROC=two": "NPROC=two must be a number of ranks",
    "local.sh NPROC=9999999": "NPROC=9999999 must be a number of ranks",
    "local.sh PYTHON=/nonexistent": "PYTHON=/nonexistent cannot be run",
    "multinode.sh PYTHON=/nonexistent": "PYTHON=/nonexistent cannot be run",
    "multinode.sh NNODES=08": "NNODES=08 (or MIN:MAX, from 1)",
    "multinode.sh NNODES=0": "NNODES=0 (or MIN:MAX, from 1)",
    "multinode.sh NNODES=1:x": "NNODES=1:x (or MIN:MAX, from 1)",
    "multinode.sh NODE_RANK=-1": "NNODES=1 (or MIN:MAX, from 1), NODE_RANK=-1",
    "multinode.sh NODE_RANK=1": "node_rank=1 must be 0 to 0",
    "multinode.sh PORT=99999": "port=99999 must be 1 to 65535",
    "multinode.sh MAX_RESTARTS=abc": (
        "NNODES=1 (or MIN:MAX, from 1), NODE_RANK=0, PORT=29400 and MAX_RESTARTS=abc"
    ),
    "multinode.sh JOIN_SECONDS=abc": "timeout=abc must be a number",
    "multinode.sh HEAD=no-such-host.invalid": "head 'no-such-host.invalid' does not resolve",
    "multinode.sh HOSTS=,, NODE_RANK=": "HOSTS=,, must name at least one host",
    "multinode.sh HOSTS=a SSH=/nonexistent NODE_RANK=": "/nonexistent cannot be run",
}


@pytest.mark.fault("a wrong variable of a launch script")
@pytest.mark.parametrize("words", WRONG_VARIABLES)
def test_a_wrong_variable_is_one_error(words: str, tmp_path: Path) -> None:
    script, *settings = words.split()
    node = NODE if script == "multinode.sh" else []
    command = ["env", f"PYTHON={sys.executable}", *node, *settings, str(ROOT / "launch" / script)]
    done = run_command([*command, *TINY, f"output_dir={tmp_path}"])
    lines = [line for line in done.output.splitlines() if not line.startswith("node 0 of 1: ")]
    assert (done.code, len(lines)) == (2, 1), done.output
    assert lines[0].startswith(f"error: {WRONG_VARIABLES[words]}")
    assert not list(tmp_path.iterdir())


def imports_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.fault("SIGINT while torch is imported")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_at_the_start_is_no_traceback(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable] if ranks == 1 else torchrun(ranks)
    words = ["-m", "ddp_trainer", *TINY, f"output_dir={tmp_path}", "name=run", "epochs=100000"]
    with start_command([*command, *words]) as job:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        wait_for(
            lambda: (
                len(children.read_text().split()) == ranks if ranks > 1 else imports_torch(job.pid)
            )
        )
        if ranks > 1:
            wait_for(lambda: imports_torch(int(children.read_text().split()[-1])))
        os.killpg(job.pid, signal.SIGINT)
        output, _ = job.communicate(timeout=20)
    assert job.returncode == (-signal.SIGINT if ranks == 1 else 1)
    assert "KeyboardInterrupt" not in output
    assert ranks > 1 or output == ""


@pytest.mark.fault("SIGSTOP of a rank before it joins")
def test_a_rank_that_never_joins_is_named(tmp_path: Path) -> None:
    words = [*TINY, f"output_dir={tmp_path}", "name=run", "timeout_seconds=8"]
    done = launch(*words, ranks=2, script=FAULTY, FAULT="stop:1:join", deadline=150)
    assert done.code == 1
    assert "1 of 2 ranks came within 8 s, missing: 1" in done.output


@contextmanager
def memory_limit(name: str, megabytes: int) -> Iterator[Callable[[list[str]], list[str]]]:
    """Yield a function that returns a command with a limit on the memory of all its processes, by a
    control group.
    """
    v1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    group = (v1.parent if v1.exists() else Path("/sys/fs/cgroup")) / name
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs the right to make control groups (root)")
    (group / (v1.name if v1.exists() else "memory.max")).write_text(str(megabytes * 2**20))
    try:
        yield lambda command: [
            "bash",
            "-c",
            f'echo $$ > {group}/cgroup.procs; exec "$@"',
            "bash",
            *command,
        ]
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), seconds=20)
        group.rmdir()


@pytest.mark.fault("a limit on memory reached at the start, in training, evaluation or a save")
@pytest.mark.parametrize(
    "where", ["join", "start", "5", "evaluation", "save"] if IS_FULL else ["start", "5", "save"]
)
def test_too_little_memory_ends_the_job_which_can_be_resumed(where: str, tmp_path: Path) -> None:
    words = [*TINY, f"output_dir={tmp_path}", "name=run", "checkpoint.every_steps=2"]
    rank = 0 if where == "save" else 1
    with memory_limit(f"ddp_trainer-{os.getpid()}", 2000) as limited:
        done = run_command(
            limited([*torchrun(2), FAULTY, *words]), FAULT=f"memory:{rank}:{where}", deadline=150
        )
    assert done.code == 1, done.output
    assert "SIGKILL" in done.output or "Signal 9" in done.output, done.output
    succeed(*words, ranks=2)
    assert read_summary(tmp_path / "run")["steps"] == 16
