"""A rank whose main thread is stuck: one report names it, its place and its phase, and the job
ends.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import IS_FULL
from processes import (
    PACE,
    PACING,
    clean_environment,
    launch,
    run_command,
    start_launch,
    torchrun,
    wait_for,
)
from runs import TINY

from ddp_trainer.checkpoint.file import read_state
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.observers.failures.stacks import StackFile, parse, read_processes, stacks_of
from ddp_trainer.observers.failures.status import RankStatus, absent_ranks, grouped_lines

HANGING = str(Path(__file__).with_name("hanging.py"))
SLOW_DISK = str(Path(__file__).with_name("slow_disk.py"))
PHASES = {
    "loader": "data",
    "forward": "forward",
    "collective": "control point",
    "evaluation": "evaluation",
    "save": "save",
    "logger": "control point|evaluation",
}


COUNTS = {"forward": 7}
"""The call in which a rank is stuck, if not the second: the first passes are before the first step.
"""
ALL = [
    (where, rank)
    for where in (*PHASES, "stopped", "killed")
    for rank in (0, 1)
    if (where, rank) != ("logger", 1)
]


def words(folder: Path, seconds: int) -> list[str]:
    return [
        *TINY,
        f"output_dir={folder}",
        "name=run",
        f"timeout_seconds={seconds}",
        "log_every_steps=3",
    ]


def hang(folder: Path, where: str, rank: int, *, seconds: int) -> None:
    """Train on two ranks until one is stuck, and check the report and that nothing is left."""
    stuck = f"{rank}:{where}:{COUNTS.get(where, 2)}"
    done = launch(*words(folder, seconds), ranks=2, script=HANGING, STUCK=stuck, deadline=240)
    assert done.code == 1, done.output
    first = (
        rf"rank {rank} on \S+ has made no progress for \d+ s, in ({PHASES[where]}) after step \d+\n"
    )
    assert re.search(rf"traceback : {first}", done.output), done.output
    assert re.search(rf"rank {rank}: .*hanging\.py:\d+ in stuck_here", done.output), done.output
    text = (folder / "run/hang.log").read_text()
    assert re.match(first, text)
    assert f"rank {1 - rank} on" in text
    assert re.search(r"last collectives: .*#\d+ gloo:\w+ \[\[", text), text
    assert not any(
        Path(f"/proc/{process.pid}").exists() for process in read_processes(folder / "run")
    )


@pytest.mark.fault("the main thread of a rank stuck")
@pytest.mark.parametrize(("where", "rank"), ALL if IS_FULL else [("loader", 1), ("evaluation", 0)])
def test_a_stuck_rank_is_named_with_its_place(where: str, rank: int, tmp_path: Path) -> None:
    if where in ("stopped", "killed"):
        disturb(
            tmp_path, signal.SIGSTOP if where == "stopped" else signal.SIGKILL, rank, seconds=24
        )
    else:
        hang(tmp_path, where, rank, seconds=24)


def disturb(folder: Path, number: signal.Signals, rank: int, *, seconds: int) -> None:
    """Send a signal to a rank of a job, and check that it is named and that nothing is left."""
    command = [*torchrun(2), "-m", "ddp_trainer", *words(folder, seconds), "epochs=100000"]
    with subprocess.Popen(
        command,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        metrics = folder / "run/metrics.jsonl"
        wait_for(lambda: metrics.exists() and "train/loss" in metrics.read_text())
        processes = read_processes(folder / "run")
        os.kill(processes[rank].pid, number)
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 1, output
    failure = "was lost" if number is signal.SIGKILL else r"has not answered for \d+ s"
    assert re.search(rf"rank {rank} on \S+ {failure}.*, (last seen )?in ", output), output
    if number is signal.SIGSTOP:
        assert re.search(rf"ranks? (0, )?{rank}(, 1)?: .*:\d+ in \S+", output), output
    assert not any(Path(f"/proc/{process.pid}").exists() for process in processes)


def test_doctor_shows_where_the_ranks_of_a_run_are_and_disturbs_nothing(tmp_path: Path) -> None:
    endless = [*TINY, "epochs=100000", f"output_dir={tmp_path}", "name=run", PACE]
    job = start_launch(["-m", "ddp_trainer", *endless], ranks=2, **PACING)
    try:
        wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists())
        for _ in range(2):
            shown = launch("doctor", str(tmp_path / "run"))
            assert shown.code == 0, shown.output
            assert re.search(
                r"^rank 0 on \S+, in .* after step \d+:\n  /", shown.output, re.MULTILINE
            )
            assert re.search(r"^rank 1 on ", shown.output, re.MULTILINE)
            assert "train_epoch" in shown.output or "fit" in shown.output
        assert job.is_alive()
    finally:
        job.terminate()
        job.join(60)
    assert job.exitcode is not None
    ended = launch("doctor", str(tmp_path / "run"))
    error = f"error: no job of this user is running in {tmp_path / 'run'} on this host\n"
    assert (ended.code, ended.output) == (2, error)


@pytest.mark.fault("a disk that takes long for a checkpoint")
def test_a_disk_that_is_slow_is_not_one_that_hangs(tmp_path: Path) -> None:
    """The second save waits for the first, for longer than a rank may stand still."""
    done = launch(*words(tmp_path, 10), ranks=2, script=SLOW_DISK, PART=str(2**16), deadline=120)
    assert done.code == 0, done.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "finished"


@pytest.mark.chaos
@pytest.mark.fault("a rank fails while a slow disk has not yet written the checkpoint")
def test_a_checkpoint_that_is_being_written_outlives_the_failure_of_another_rank(
    tmp_path: Path,
) -> None:
    options = ("observer=[failing]", "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    done = launch(
        *words(tmp_path, 10),
        *options,
        ranks=2,
        script=SLOW_DISK,
        deadline=120,
        PART=str(2**15),  # the write takes 12 s
        FAIL="4",
    )
    assert done.code == 1, done.output
    assert "rank 1 fails" in done.output
    step = read_state(tmp_path / "run/checkpoints/step-00000003.pt")["step"]
    assert step == 3


def handles(pid: int, number: signal.Signals, *, launcher: int) -> bool:
    """Return whether a process has a handler of its own for a signal; before its program starts it
    has its parent's.
    """
    if Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{launcher}/cmdline").read_bytes():
        return False
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (number - 1) & 1)


def children(pid: int) -> list[int]:
    return [
        int(word)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for word in path.read_text().split()
    ]


def test_sigquit_shows_where_the_ranks_are_from_the_start_and_disturbs_nothing(
    tmp_path: Path,
) -> None:
    command = [
        *torchrun(2),
        "-m",
        "ddp_trainer",
        *TINY,
        "epochs=100000",
        f"output_dir={tmp_path}",
        "name=run",
        PACE,
    ]
    output = tmp_path / "output"
    run_dir = tmp_path / "run"
    with (
        output.open("w") as file,
        subprocess.Popen(
            command,
            env=clean_environment(**PACING),
            stdout=file,
            stderr=file,
            start_new_session=True,
        ) as job,
    ):
        try:
            wait_for(lambda: len(children(job.pid)) == 2)
            rank = max(children(job.pid))
            wait_for(lambda: handles(rank, signal.SIGQUIT, launcher=job.pid))
            assert not run_dir.exists()
            os.kill(rank, signal.SIGQUIT)
            wait_for(lambda: "most recent call first" in output.read_text())
            wait_for(lambda: (run_dir / "metrics.jsonl").exists())
            os.kill(rank, signal.SIGQUIT)
            wait_for(
                lambda: (
                    (run_dir / "stacks.log").exists()
                    and "rank 1 on" in (run_dir / "stacks.log").read_text()
                )
            )
            assert "rank 0 on" in (run_dir / "stacks.log").read_text()
            assert job.poll() is None
        finally:
            os.kill(job.pid, signal.SIGTERM)
            job.wait(timeout=60)


CLOSE = """
import faulthandler, os, signal
from ddp_trainer.observers.failures.stacks import StackFile

faulthandler.register(signal.SIGQUIT, file=2)
StackFile().close()
os.kill(os.getpid(), signal.SIGQUIT)
"""


@pytest.mark.parametrize(
    "forged",
    [
        {},
        {"stack_file": "../../../{link}"},
        {"stack_file": "0/../../../..{link}"},
        {"stack_file": 0},
        {"stack_file": 10**6},
        {"stack_file": None},
        {"pid": "{pid}/../{pid}", "stack_file": "../../..{link}"},
        {"pid": True},
        {"pid": -1},
        {"rank": "0"},
        {"host": None},
    ],
)
def test_the_process_list_of_somebody_else_does_not_name_whom_to_signal(
    forged: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("name: run\n")
    link = tmp_path / "link"
    link.symlink_to(StackFile.NAME)
    with subprocess.Popen(["sleep", "60"]) as victim:
        values = {"rank": 0, "host": socket.gethostname(), "pid": victim.pid, "stack_file": 3}
        for key, value in forged.items():
            is_text = isinstance(value, str)
            values[key] = value.format(pid=victim.pid, link=link) if is_text else value
        (tmp_path / "run/processes.json").write_text(json.dumps([values]))
        try:
            with pytest.raises(ConfigError, match=r"no job of this user|no rank of"):
                stacks_of(tmp_path / "run")
            assert victim.poll() is None
        finally:
            victim.kill()


def test_sigquit_does_not_end_a_process_that_has_closed_its_stack_file() -> None:
    done = run_command([sys.executable, "-c", CLOSE])
    assert done.code == 0
    assert "most recent call first" in done.output


# --- who is absent ------------------------------------------------------------------------------

REDUCE = "/x/site-packages/torch/distributed/distributed_c10d.py:3000 in all_reduce"
BACKWARD = "/x/site-packages/torch/autograd/graph.py:800 in _engine_run_backward"
LOAD = "/home/me/images.py:12 in read"


def at(rank: int, frame: str, phase: str = "backward", step: int = 7) -> RankStatus:
    is_waiting = frame != LOAD
    return RankStatus(rank, "node", phase, step, is_waiting=is_waiting, frames=[frame])


@pytest.mark.parametrize(
    ("stacks", "absent"),
    [
        ([at(0, BACKWARD), at(1, LOAD, "data"), at(2, BACKWARD)], [1]),
        ([at(0, BACKWARD), at(1, REDUCE, "data"), at(2, BACKWARD)], [1]),
        ([at(0, REDUCE, step=8), at(1, REDUCE, step=7)], [1]),
        ([at(0, BACKWARD), at(1, BACKWARD)], []),
        ([at(0, LOAD, "data")], [0]),
        ([at(0, BACKWARD)], [0]),
        ([at(0, LOAD, "data"), at(1, LOAD, "data"), at(2, LOAD, "forward")], [2]),
    ],
)
def test_the_absent_ranks_are_those_that_the_others_wait_for(
    stacks: list[RankStatus], absent: list[int]
) -> None:
    assert [stack.rank for stack in absent_ranks(stacks)] == absent


def test_ranks_in_one_place_share_a_line() -> None:
    lines = grouped_lines([at(0, BACKWARD), at(1, LOAD, "data"), at(2, BACKWARD)])
    assert lines[0] == "rank 1: data after step 7, at /home/me/images.py:12 in read"
    assert lines[1].startswith("ranks 0, 2: backward after step 7")


def test_the_text_of_faulthandler_is_read() -> None:
    text = subprocess.run(
        [
            sys.executable,
            "-c",
            "import faulthandler, threading\n"
            "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
            "def stuck(): faulthandler.dump_traceback(all_threads=True)\nstuck()",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert parse(text) == ["<string>:3 in stuck", "<string>:4 in <module>"]
