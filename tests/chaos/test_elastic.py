"""A node lost and come back: torchrun goes on with one node, then with two, and no sample is lost
or used twice.
"""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import clean_environment, wait_for
from runs import TINY, newest_step

from ddp_trainer.tools.verify import find_damage

LONG = (
    *TINY,
    "epochs=400",
    "num_threads=1",
    "checkpoint.every_steps=25",
    "checkpoint.keep_last=2",
    "timeout_seconds=20",
)
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2,join_timeout=60"


def start_node(tmp_path: Path, port: int, name: str) -> subprocess.Popen:
    """Start a torchrun agent with one rank, as a node of a job of one or two."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        "--nproc_per_node=1",
        "--max-restarts=20",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{port}",
        "--rdzv_id=elastic",
        "--local_addr=127.0.0.1",
        f"--rdzv_conf=is_host={int(name == 'first')},{RENDEZVOUS}",
        "-m",
        "ddp_trainer",
        *LONG,
        f"output_dir={tmp_path}",
        "name=run",
    ]
    # torch 2.14's shared store forgets to tell a node that comes back where it is: the agents' logs
    # end in a time-out on MASTER_ADDR. This switches the sharing off.
    environment = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with open(tmp_path / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path
        )


@pytest.mark.fault("loss and return of a node of an elastic job")
@pytest.mark.timeout(600)
def test_a_node_lost_and_come_back(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_dir = tmp_path / "run"
    log = tmp_path / "first.log"

    def launches(world_size: int) -> int:
        return log.read_text().count(f"{world_size} × cpu") if log.exists() else 0

    def progress() -> None:
        before = newest_step(run_dir)
        wait_for(lambda: newest_step(run_dir) >= before + 50 or first.poll() is not None)

    first = start_node(tmp_path, port, "first")
    second = start_node(tmp_path, port, "second")
    wait_for(lambda: launches(2) >= 1)
    progress()
    second.send_signal(signal.SIGKILL)  # the agent; its rank sees that and goes too
    second.wait()
    wait_for(lambda: launches(1) >= 1)
    progress()
    second = start_node(tmp_path, port, "second")
    wait_for(lambda: launches(2) >= 2)
    assert first.wait(timeout=200) == 0, log.read_text()[-4000:]
    assert second.wait(timeout=60) == 0, (tmp_path / "second.log").read_text()[-4000:]

    # check_ledger computes from the seed which samples each epoch has to use
    assert not any(find_damage(run_dir).values())
