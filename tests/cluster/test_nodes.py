"""launch/multinode.sh on four hosts: by hand on each, over ssh, stopped gracefully, and with a host that dies."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import TINY, read_summary

from cluster.namespaces import NEEDS, ROOT, Hosts, can_make_hosts
from ddp_trainer.commands.verify import find_damage

pytestmark = [pytest.mark.skipif(not can_make_hosts(), reason=NEEDS), pytest.mark.timeout(600)]

SCRIPT = str(ROOT / "launch" / "multinode.sh")
LONG = (
    *TINY, "epochs=4000", "num_threads=1", "checkpoint.every_steps=10", "checkpoint.keep_last=2", "timeout_seconds=20"
)  # fmt: skip
"""More than a test waits for: it is stopped, and continued to a nearer end."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(4) as made:
        yield made


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


class Job:
    """multinode.sh by hand on each of some hosts, one rank a node, in tmp_path/run."""

    def __init__(self, hosts: Hosts, folder: Path, *overrides: str, nnodes: str = "4") -> None:
        self.hosts, self.folder, self.nnodes = hosts, folder, nnodes
        self.overrides = (*overrides, f"output_dir={folder}", "name=run")
        self.run_dir = folder / "run"
        self.nodes = {number: self.start(number) for number in range(len(hosts.names))}

    def start(self, number: int) -> subprocess.Popen:
        return self.hosts.start(
            number, [SCRIPT, *self.overrides], self.log(number), NNODES=self.nnodes, NODE_RANK=str(number),
            HEAD="node0", NPROC="1", JOIN_SECONDS="60",
        )  # fmt: skip

    def log(self, number: int) -> Path:
        return self.folder / f"node{number}.log"

    def told(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def codes(self, seconds: float = 240) -> dict[int, int]:
        """Wait for the nodes and return their exit codes."""
        deadline = time.monotonic() + seconds
        return {number: node.wait(max(1, deadline - time.monotonic())) for number, node in self.nodes.items()}

    def launches(self, world_size: int) -> int:
        """Return how often the ranks, so many in all, have begun to train."""
        return sum(log.read_text().count(f"{world_size} × cpu") for log in self.folder.glob("*.log"))

    def newest_step(self) -> int:
        return max((int(path.stem[5:]) for path in (self.run_dir / "checkpoints").glob("step-*.pt")), default=0)

    def progress(self, steps: int = 20) -> None:
        before = self.newest_step()
        wait_for(lambda: self.newest_step() >= before + steps, f"{steps} steps more; {self.told()}")


def nothing_lost(run_dir: Path) -> bool:
    """Return whether each epoch used the samples that the seed says, and no other."""
    problems = [problem for problems in find_damage(run_dir).values() for problem in problems]
    assert problems == []
    return True


def test_four_hosts_train_to_the_end(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, *TINY)
    assert job.codes() == dict.fromkeys(range(4), 0), job.told()
    summary = read_summary(job.run_dir)
    assert (summary["world_size"], summary["steps"], summary["eval/count"]) == (4, 16, 31)
    assert nothing_lost(job.run_dir)
    assert "node 1 of 4: 10.83.0.2 on eth0, head 10.83.0.1:29400" in job.log(1).read_text()


PYTHON = """#!/bin/sh
case "$*" in *node-check*)
    echo "$DDP_TRAINER_JOB_SECRET" >>{folder}/secrets
    cat /proc/[0-9]*/cmdline >>{folder}/commands
esac
exec {python} "$@"
"""
"""Records the secret of each node check, and the command lines that ps would show at that moment."""


def test_one_command_runs_on_all_hosts_and_keeps_its_arguments_and_its_secret(hosts: Hosts, tmp_path: Path) -> None:
    (python := tmp_path / "python").write_text(PYTHON.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    hostile = "a b  'c' \"d\" $(touch pwned) `touch pwned` $HOME * \\ ; & | ~ ü\nsecond line"
    quoted = hostile.replace('"', '\\"')
    done = subprocess.run(
        [*hosts.words(0), SCRIPT, *TINY, f'output_dir="{tmp_path}/{quoted}"', "name=run"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), "HOSTS": "node0 node1 node2 node3",
             "NPROC": "1", "JOIN_SECONDS": "60", "SSH": str(hosts.ssh(tmp_path)), "PYTHON": str(python)},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_summary(tmp_path / hostile / "run")["world_size"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"ssh", "python", "secrets", "commands", hostile}
    [secret] = set(secrets := (tmp_path / "secrets").read_text().split())
    assert len(secrets) == 4
    assert len(secret) == 32
    commands = (tmp_path / "commands").read_text(errors="replace")
    assert "multinode.sh" in commands
    assert secret not in commands


def test_a_signal_on_one_host_stops_all_gracefully(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, *LONG)
    job.progress()
    job.nodes[2].send_signal(signal.SIGTERM)
    assert job.codes() == dict.fromkeys(range(4), 0), job.told()
    assert (job.run_dir / "stopped").exists()
    step = read_summary(job.run_dir)["steps"]
    again = Job(hosts, tmp_path, *LONG, f"max_steps={step + 10}")
    assert again.codes() == dict.fromkeys(range(4), 0), again.told()
    assert read_summary(job.run_dir)["steps"] == step + 10
    assert nothing_lost(job.run_dir)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_launching_script_stops_all_hosts_gracefully(
    end: signal.Signals, hosts: Hosts, tmp_path: Path
) -> None:
    launcher = hosts.start(
        0, [SCRIPT, *LONG, f"output_dir={tmp_path}", "name=run"], tmp_path / "launcher.log",
        HOSTS="node0 node1 node2 node3", NPROC="1", JOIN_SECONDS="60", SSH=str(hosts.ssh(tmp_path)),
    )  # fmt: skip
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*.pt")), "a checkpoint")
    launcher.send_signal(end)
    assert launcher.wait(120) == (0 if end == signal.SIGTERM else -signal.SIGKILL)
    wait_for(lambda: not any(map(hosts.processes, range(4))), "all processes to end")
    assert (tmp_path / "run" / "stopped").exists(), (tmp_path / "launcher.log").read_text()


def test_a_host_dies_and_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    """Its power is cut: no other host is notified, and torchrun has to detect it."""
    job = Job(hosts, tmp_path, *LONG, nnodes="2:4")
    wait_for(lambda: job.launches(4) >= 1, f"four ranks; {job.told()}")
    job.progress()
    hosts.cut(2)
    wait_for(lambda: job.launches(3) >= 1, f"three ranks; {job.told()}")
    job.progress()
    hosts.power_on(2)
    job.nodes[2] = job.start(2)
    wait_for(lambda: job.launches(4) >= 2, f"four ranks again; {job.told()}")
    job.progress()
    job.nodes[1].send_signal(signal.SIGTERM)
    assert job.codes() == dict.fromkeys(range(4), 0), job.told()
    epochs = read_summary(job.run_dir)["steps"] // 8 + 2
    final = Job(hosts, tmp_path, *LONG, f"epochs={epochs}", nnodes="2:4")
    assert final.codes() == dict.fromkeys(range(4), 0), final.told()
    assert read_summary(job.run_dir)["steps"] == 8 * epochs
    assert nothing_lost(job.run_dir)


def test_the_doctor_examines_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    done = subprocess.run(
        [*hosts.words(0), SCRIPT, "doctor", f"output_dir={tmp_path}"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), "HOSTS": "node0, node1",
             "NPROC": "1", "JOIN_SECONDS": "60", "SSH": str(hosts.ssh(tmp_path))},
        capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    output = " ".join(done.stdout.split())
    assert " eth0 ✓" in output
    assert "✓ process group 2 ranks on 2 nodes, gloo on cpu ✓" in output
    assert done.stdout.endswith("ready: 2 ranks can train here\n")
