"""launch/local.sh and the agent: the ranks, arguments that no shell may touch, signals, exit codes,
open ports.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from processes import clean_environment, processes_with, run_command, wait_for
from runs import TINY, read_summary

from ddp_trainer.cores import usable_cores

LOCAL = str(Path(__file__).resolve().parents[2] / "launch" / "local.sh")
AGENT = (sys.executable, "-m", "ddp_trainer.launchers.agent", "--rdzv-backend=bound")
HOSTILE = "a b  'c' \"d\" $(touch pwned) `touch pwned` $HOME * \\ ; & | ~ ü\nsecond line"


def test_arguments_reach_the_run_unchanged(tmp_path: Path) -> None:
    quoted = HOSTILE.replace('"', '\\"')
    done = run_command(
        [LOCAL, *TINY, f'output_dir="{tmp_path}/{quoted}"', "name=run"],
        cwd=tmp_path,
        NPROC="2",
        PYTHON=sys.executable,
    )
    assert done.code == 0, done.output
    assert read_summary(tmp_path / HOSTILE / "run")["world_size"] == 2
    assert [path.name for path in tmp_path.iterdir()] == [HOSTILE]


COUNT = 'source "$1"; python=$2; count_ranks; echo "$ranks"'


@pytest.mark.parametrize(
    ("visible", "ranks"), [("0,2", 2), ("-1", usable_cores()), ("", usable_cores())]
)
def test_ranks_are_the_visible_gpus_or_else_the_cores(
    visible: str, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: a\\nGPU 1: b\\nGPU 2: c\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = run_command(
        ["bash", "-c", COUNT, "bash", str(Path(LOCAL).with_name("functions.sh")), sys.executable],
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        CUDA_VISIBLE_DEVICES=visible,
    )
    assert done.output == f"{ranks}\n"


def test_a_mistake_is_one_error_and_nothing_starts(tmp_path: Path) -> None:
    done = run_command(
        [LOCAL, *TINY, "optimiser=sgd", f"output_dir={tmp_path}"], NPROC="2", PYTHON=sys.executable
    )
    assert done.code == 2
    assert done.output.startswith("error: optimiser=sgd is unknown")
    assert done.output.count("\n") == 1
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
            command,
            env=clean_environment(NPROC="2", PYTHON=sys.executable, TMPDIR=str(tmp_path)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    wait_for(lambda: "epoch 1/" in (tmp_path / "log").read_text())
    return process


def ranks_of(tmp_path: Path) -> list[int]:
    """Return the ids of the processes that were started for the run in `tmp_path`."""
    return processes_with(f"TMPDIR={tmp_path}")


def test_one_signal_stops_gracefully_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "run" / "stopped").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {
        "log",
        "run",
        ".run.lock",
        "torchinductor_root",
    }
    assert ranks_of(tmp_path) == []


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    process = start(tmp_path)
    listing = run_command(
        ["ps", "-ww", "-o", "pid=,args=", "-p", ",".join(map(str, ranks_of(tmp_path)))]
    ).output
    ranks = [
        int(s.split()[0])
        for s in listing.splitlines()
        if "job_file=" in s and "launchers.agent" not in s
    ]
    assert len(ranks) == 2, listing
    os.kill(ranks[0], signal.SIGSTOP)  # so that the graceful stop cannot end
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGKILL
    wait_for(lambda: ranks_of(tmp_path) == [])


def test_ranks_do_not_outlive_the_script(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.kill()
    process.wait()
    wait_for(lambda: ranks_of(tmp_path) == [])


def test_what_listens_is_reached_from_this_host_only(tmp_path: Path) -> None:
    """torchrun's own stores listen on all network interfaces, and that of --standalone executes
    pickles.
    """
    process = start(tmp_path)
    pids = ranks_of(tmp_path)
    sockets = run_command(["ss", "-Hltnp"]).output.splitlines()
    listening = [line.split()[3] for line in sockets if any(f"pid={pid}," in line for pid in pids)]
    assert listening
    assert [
        address for address in listening if not address.startswith(("127.0.0.1:", "[::1]:"))
    ] == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0


def test_a_port_that_is_taken_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        done = run_command([*AGENT, f"--rdzv-endpoint={endpoint}", "-m", "ddp_trainer"])
    assert done.code == 1
    assert done.output.startswith(
        f"error: torchrun's store cannot listen on {endpoint} (Address already in use)"
    )
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (2, 2), (77, 1)])
def test_the_agent_exits_with_2_for_the_users_input_only(code: int, expected: int) -> None:
    program = ["--no-python", "sh", "-c", f"exit {code}"]
    done = run_command([*AGENT, "--rdzv-endpoint=127.0.0.1:0", *program], OMP_NUM_THREADS="1")
    assert done.code == expected, done.output
    assert "Traceback" not in done.output
