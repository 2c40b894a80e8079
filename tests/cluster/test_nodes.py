"""launch/multinode.sh on several hosts: by hand on each, over ssh, stopped gracefully, and with a
host that dies.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PACE, PACING
from runs import TINY, newest_step, read_summary

from cluster.namespaces import ROOT, SCRIPT, Hosts
from cluster.slurm import until
from cluster.test_scripts import HOSTILE
from ddp_trainer.tools.verify import find_damage

pytestmark = pytest.mark.timeout(600)

LONG = (
    *TINY,
    PACE,
    "epochs=4000",
    "checkpoint.every_steps=10",
    "checkpoint.keep_last=2",
    "timeout_seconds=20",
)
"""More than a test waits for: it is stopped, and continued to a nearer end."""


class Job:
    """multinode.sh by hand on each of the first `count` hosts, one rank a node, in tmp_path/run."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        *overrides: str,
        count: int,
        min_nodes: int | None = None,
        **variables: str,
    ) -> None:
        self.variables = PACING | variables
        self.hosts = hosts
        self.folder = folder
        self.nnodes = str(count) if min_nodes is None else f"{min_nodes}:{count}"
        self.overrides = (*overrides, f"output_dir={folder}", "name=run")
        self.run_dir = folder / "run"
        self.nodes = {number: self.start(number) for number in range(count)}

    def start(self, number: int) -> subprocess.Popen:
        return self.hosts.start(
            number,
            [SCRIPT, *self.overrides],
            self.log(number),
            NNODES=self.nnodes,
            NODE_RANK=str(number),
            HEAD="node0",
            NPROC="1",
            JOIN_SECONDS="60",
            **self.variables,
        )

    def log(self, number: int) -> Path:
        return self.folder / f"node{number}.log"

    def told(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-3000:]}"
            for log in sorted(self.folder.glob("*.log"))
        )

    def finish(self) -> None:
        """Wait for the nodes, and fail the test unless all exit with 0."""
        deadline = time.monotonic() + 240
        codes = [node.wait(max(1, deadline - time.monotonic())) for node in self.nodes.values()]
        assert codes == [0] * len(codes), self.told()

    def until_it_trains(self, world_size: int, *, launches: int = 1) -> None:
        """Wait until so many ranks have begun to train so often, and have then made progress."""

        def count() -> int:
            return sum(
                log.read_text().count(f"{world_size} × cpu") for log in self.folder.glob("*.log")
            )

        until(
            lambda: count() >= launches, f"{world_size} ranks train", deadline=120, report=self.told
        )
        before = newest_step(self.run_dir)
        until(
            lambda: newest_step(self.run_dir) >= before + 20,
            "20 steps more",
            deadline=120,
            report=self.told,
        )


PYTHON = """#!/bin/sh
case "$*" in *node-check*)
    echo "$DDP_TRAINER_JOB_SECRET" >>{folder}/secrets
    cat /proc/[0-9]*/cmdline >>{folder}/commands
esac
exec {python} "$@"
"""
"""Records the secret of each node check, and the command lines that ps would show at that moment.
"""


def test_one_command_runs_on_all_hosts_and_keeps_its_arguments_and_its_secret(
    hosts: Hosts, tmp_path: Path
) -> None:
    (python := tmp_path / "python").write_text(
        PYTHON.format(folder=tmp_path, python=sys.executable)
    )
    python.chmod(0o755)
    quoted = HOSTILE.replace('"', '\\"')
    done = subprocess.run(
        [*hosts.words(0), SCRIPT, *TINY, f'output_dir="{tmp_path}/{quoted}"', "name=run"],
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOSTS": "node0 node1 node2 node3",
            "NPROC": "1",
            "JOIN_SECONDS": "60",
            "SSH": str(hosts.ssh(tmp_path)),
            "PYTHON": str(python),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node 1 of 4: 10.83.0.2 on eth0, head 10.83.0.1:29400" in done.stdout + done.stderr
    summary = read_summary(tmp_path / HOSTILE / "run")
    assert (summary["world_size"], summary["steps"], summary["eval/count"]) == (4, 16, 31)
    assert {path.name for path in tmp_path.iterdir()} == {
        "ssh",
        "python",
        "secrets",
        "commands",
        HOSTILE,
    }
    [secret] = set(secrets := (tmp_path / "secrets").read_text().split())
    assert len(secrets) == 4
    assert len(secret) == 32
    commands = (tmp_path / "commands").read_text(errors="replace")
    assert "multinode.sh" in commands
    assert secret not in commands


def test_a_signal_on_one_host_stops_all_gracefully(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, *LONG, count=2)
    job.until_it_trains(2)
    job.nodes[1].send_signal(signal.SIGTERM)
    job.finish()
    assert (job.run_dir / "stopped").exists()
    step = read_summary(job.run_dir)["steps"]
    Job(hosts, tmp_path, *LONG, f"max_steps={step + 10}", count=2).finish()
    assert read_summary(job.run_dir)["steps"] == step + 10
    assert not any(find_damage(job.run_dir).values())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_launching_script_stops_all_hosts_gracefully(
    end: signal.Signals, hosts: Hosts, tmp_path: Path
) -> None:
    launcher = hosts.start(
        0,
        [SCRIPT, *LONG, f"output_dir={tmp_path}", "name=run"],
        tmp_path / "launcher.log",
        HOSTS="node0 node1",
        NPROC="1",
        JOIN_SECONDS="60",
        SSH=str(hosts.ssh(tmp_path)),
        **PACING,
    )
    until(lambda: newest_step(tmp_path / "run") > 0, "a checkpoint", deadline=120)
    launcher.send_signal(end)
    assert launcher.wait(120) == (0 if end == signal.SIGTERM else -signal.SIGKILL)
    until(lambda: not any(map(hosts.processes, range(2))), "all processes have ended", deadline=120)
    assert (tmp_path / "run" / "stopped").exists(), (tmp_path / "launcher.log").read_text()


def test_a_host_dies_and_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    """Its power is cut: no other host is notified, and its heartbeats have to be missed."""

    def wait_for(text: str) -> None:
        until(lambda: text in job.log(0).read_text(), text, deadline=120, report=job.told)

    job = Job(hosts, tmp_path, *LONG, count=3, min_nodes=2)
    job.until_it_trains(3)
    hosts.cut(2)
    wait_for("2 ranks went on")
    hosts.power_on(2)
    job.nodes[2] = job.start(2)
    wait_for("3 ranks went on")
    job.nodes[1].send_signal(signal.SIGTERM)
    job.finish()
    assert (job.run_dir / "stopped").exists()
    assert not any(find_damage(job.run_dir).values())


def test_the_doctor_examines_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    done = subprocess.run(
        [*hosts.words(0), SCRIPT, "doctor", f"output_dir={tmp_path}"],
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOSTS": "node0, node1",
            "NPROC": "1",
            "JOIN_SECONDS": "60",
            "SSH": str(hosts.ssh(tmp_path)),
        },
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = " ".join(done.stdout.split())
    assert " eth0 ✓" in output
    assert "✓ process group 2 ranks on 2 nodes, gloo on cpu ✓" in output
    assert done.stdout.endswith("ready: 2 ranks can train here\n")
