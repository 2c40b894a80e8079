"""launch/local.sh: the ranks it starts, arguments that no shell may touch, and what signals do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import TINY, clean_environment, read_summary, run_command

LOCAL = str(Path(__file__).resolve().parents[2] / "launch" / "local.sh")
HOSTILE = "a b  'c' \"d\" $(touch pwned) `touch pwned` $HOME * \\ ; & | ~ ü\nsecond line"


def wait_for(condition: Callable[[], object], what: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def test_arguments_reach_the_run_unchanged(tmp_path: Path) -> None:
    quoted = HOSTILE.replace('"', '\\"')
    done = run_command([LOCAL, *TINY, f'output_dir="{tmp_path}/{quoted}"', "name=run"], cwd=tmp_path,
                       NPROC="2", PYTHON=sys.executable)  # fmt: skip
    assert done.code == 0, done.output
    assert read_summary(tmp_path / HOSTILE / "run")["world_size"] == 2
    assert [path.name for path in tmp_path.iterdir()] == [HOSTILE]


@pytest.mark.parametrize(
    ("argument", "ranks", "told"),
    [
        ("optimiser=sgd", "2", "error: optimiser=sgd is unknown: did you mean optimizer?\n"),
        ("seed=1", "two", "error: NPROC=two is no number of ranks: set it from 1, or leave it to the GPUs or cores of "
                          "this host\n"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_error_and_nothing_starts(argument: str, ranks: str, told: str, tmp_path: Path) -> None:
    done = run_command([LOCAL, *TINY, argument, f"output_dir={tmp_path}"], NPROC=ranks, PYTHON=sys.executable)
    assert (done.code, done.output) == (2, told)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(autouse=True)
def _leave_nothing_running(tmp_path: Path) -> Iterator[None]:
    """End what a test that failed has left: it would train for minutes."""
    yield
    for pid in ranks_of(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(tmp_path: Path) -> subprocess.Popen:
    """Start a run that would take minutes, and wait until it trains."""
    command = [LOCAL, *TINY, "epochs=100000", f"output_dir={tmp_path}", "name=run"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command, env=clean_environment(NPROC="2", PYTHON=sys.executable, TMPDIR=str(tmp_path)),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    wait_for(lambda: "epoch 1/" in (tmp_path / "log").read_text(), "an epoch")
    return process


def ranks_of(tmp_path: Path) -> list[int]:
    """Return the ids of the processes that were started for the run in `tmp_path`."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if f"TMPDIR={tmp_path}".encode() in read(path).split(b"\0")
    ]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has ended


def test_one_signal_stops_softly_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "run" / "stopped").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"log", "run", "torchinductor_root"}  # the last is torch's
    assert ranks_of(tmp_path) == []


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    process = start(tmp_path)
    commands = {pid: read(Path(f"/proc/{pid}/cmdline")) for pid in ranks_of(tmp_path)}
    ranks = [
        pid for pid, words in commands.items() if b"ddp_trainer.job" in words and b"ddp_trainer.agent" not in words
    ]
    assert len(ranks) == 2, commands
    os.kill(ranks[0], signal.SIGSTOP)  # so that the soft stop cannot come to its end
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGKILL
    wait_for(lambda: ranks_of(tmp_path) == [], "the ranks to end")


def test_ranks_do_not_outlive_the_script(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill()
    process.wait()
    wait_for(lambda: ranks_of(tmp_path) == [], "the ranks to end")
