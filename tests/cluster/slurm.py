"""A real SLURM cluster on this host: a controller, a munge daemon and a few nodes, for as long as a
test session.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import pytest
from processes import clean_environment, held_port, processes_with

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "mount")
FINAL = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
}
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
MpiDefault=none
FirstJobId={port}
MinJobAge=86400
JobRequeue=1
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MessageTimeout=20
SlurmdTimeout=15
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=60
PartitionName=brief Nodes=ALL MaxTime=60 PriorityTier=1 GraceTime=0 PreemptMode=CANCEL
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=4 Gres=gpu:2"


class SlurmCluster:
    """`size` nodes of 4 CPUs and 2 GPUs (counted by SLURM, there or not), tracked by cgroup as in
    production.

    Partition ``main`` is the default; a job in ``urgent`` preempts what runs there, and cancels
    what runs in ``brief``. Nothing of it outlives `stop`. Job ids and node names are those of no
    other cluster on this host.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        port, *self._node_ports = (held_port() for _ in range(1 + size))
        self.nodes = [f"n{port}-{number}" for number in range(size)]
        self.environment = {"SLURM_CONF": str(self.config)}
        """What a command needs in its environment to find this cluster."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._cgroup = folder / "cgroup" / "freezer"
        self._write(port)

    def _write(self, port: int) -> None:
        host = socket.gethostname().partition(".")[0]
        nodes = [
            NODE.format(name=name, host=host, port=own)
            for name, own in zip(self.nodes, self._node_ports, strict=True)
        ]
        self.config.write_text(
            SLURM_CONF.format(host=host, port=port, folder=self.folder, nodes="\n".join(nodes))
        )
        (self.folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self._cgroup.parent}\nCgroupAutomount=no\n"
        )
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-1]\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for name in ("state", "output"):
            (self.folder / name).mkdir()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- daemons ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle."""
        self._cgroup.mkdir(parents=True)
        subprocess.run(
            ["mount", "-t", "cgroup", "-o", "freezer", "freezer", self._cgroup], check=True
        )
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--socket={self.folder}/munge.socket",
            f"--key-file={self.folder}/munge.key",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munge.seed",
        )
        until(lambda: (self.folder / "munge.socket").exists(), "munged has its socket")
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.config))
        until(lambda: "UP" in self.run("scontrol", "ping", check=False), "slurmctld answers")
        for name in self.nodes:
            self.start_node(name)
        until(
            lambda: all(self.node_state(name) == "IDLE" for name in self.nodes),
            "all nodes are idle",
        )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._start(name, "slurmd", "-D", "-f", str(self.config), "-N", name, NODE_UNDER_TEST=name)

    def _start(self, name: str, *command: str, **extra: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=clean_environment(**self.environment, **extra),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill_node(self, name: str) -> None:
        """End a node as a power cut does: SIGKILL for its slurmd and for all that it had
        started.
        """
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        self._kill_all(f"NODE_UNDER_TEST={name}", f"SLURMD_NODENAME={name}")

    def stop(self) -> None:
        """End all jobs, daemons and mounts of this cluster."""
        if "slurmctld" in self._daemons:
            self.run("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and self.run("squeue", "--noheader", check=False):
                time.sleep(0.2)
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        self._kill_all(f"SLURM_CONF={self.config}")
        if self._cgroup.is_mount():
            for name in self.nodes:
                for path, _, _ in os.walk(self._cgroup / f"slurm_{name}", topdown=False):
                    os.rmdir(path)  # its files go with it
            subprocess.run(["umount", self._cgroup], check=True)

    def _kill_all(self, *variables: str) -> None:
        """SIGKILL every process that has one of `variables` in its environment, and wait until it
        is gone.
        """

        def kill() -> bool:
            victims = [pid for variable in variables for pid in processes_with(variable)]
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not victims

        until(kill, "the killed processes are gone")

    # --- jobs -------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, **extra: str) -> str:
        """Return what a command of SLURM's printed; with `check`, fail the test unless it
        exits 0.
        """
        done = subprocess.run(
            command,
            env=clean_environment(**self.environment, **extra),
            cwd=cwd,
            text=True,
            timeout=90,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}"
        return done.stdout.strip()

    def submit(self, *arguments: str, cwd: Path | None = None, **extra: str) -> int:
        """Hand a job to ``sbatch`` and return its id; `extra` is its environment's."""
        output = f"--output={self.folder}/output/%j.out"
        return int(
            self.run("sbatch", "--parsable", output, *arguments, check=True, cwd=cwd, **extra)
        )

    def show(self, job_id: int) -> list[dict[str, str]]:
        """Return SLURM's records of a job: several for an array, which its id names as a whole."""
        text = self.run("scontrol", "show", "job", str(job_id))
        records = [
            re.findall(r"(\S+?)=(\S*)", record) for record in re.split(r"\n\n(?=JobId=)", text)
        ]
        # The job's own arguments, which may be anything, stand in the middle: after all fields but
        # the last few.
        return [dict(reversed(fields)) | {"StdOut": dict(fields)["StdOut"]} for fields in records]

    def wait(self, job_id: int, *, deadline: float = 180) -> str:
        """Return the state in which a job ended, of an array the first that is not COMPLETED if
        there is one.

        A requeued job would have to wait two minutes for its turn: it is let go at once.
        """
        states: list[str] = []

        def is_over() -> bool:
            nonlocal states
            jobs = self.show(job_id)
            for job in jobs:
                self.hasten(job)
            states = [job["JobState"] for job in jobs]
            return all(map(self._is_over, jobs))

        until(
            is_over,
            f"job {job_id} is over",
            deadline=deadline,
            report=lambda: f"{states}\n{self.output(job_id)}",
        )
        return next((state for state in states if state != "COMPLETED"), "COMPLETED")

    def _is_over(self, job: dict[str, str]) -> bool:
        is_to_be_requeued = job["JobState"] == "NODE_FAIL" and job["Requeue"] == "1"
        return job["JobState"] in FINAL and not is_to_be_requeued

    def hasten(self, job: dict[str, str]) -> None:
        """Let a requeued job begin in seconds; in the second of its end, nodes would refuse it as
        ended. Its script must have ended, because it excludes nodes after it has requeued the job.
        """
        begins = job["StartTime"]
        soon = (datetime.now() + timedelta(seconds=10)).isoformat()
        if (
            job["JobState"] == "PENDING"
            and job["Reason"] == "BeginTime"
            and soon < begins != "Unknown"
            and not processes_with(f"SLURM_JOB_ID={job['JobId']}")
        ):
            self.run("scontrol", "update", f"JobId={job['JobId']}", "StartTime=now+3", check=False)

    def output(self, job_id: int) -> str:
        """Return what a job has printed so far, of an array one task after the other."""
        files = [Path(job["StdOut"]) for job in self.show(job_id)]
        return "".join(file.read_text() for file in files if file.exists())

    def node_state(self, name: str) -> str:
        """Return a node's state: IDLE, ALLOCATED, MIXED, DOWN …, with SLURM's flags."""
        words = self.run("scontrol", "--oneliner", "show", "node", name, check=False).split()
        return next(
            (word.partition("=")[2] for word in words if word.startswith("State=")), "UNKNOWN"
        )


def until(
    is_so: Callable[[], bool],
    what: str,
    *,
    deadline: float = 60,
    report: Callable[[], str] = lambda: "",
) -> None:
    """Wait until `is_so`; fail the test after `deadline` seconds."""
    end = time.monotonic() + deadline
    while not is_so():
        if time.monotonic() > end:
            pytest.fail(f"not so after {deadline} s: {what}\n{report()}")
        time.sleep(0.2)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A running cluster of four nodes; needs root and Debian's slurm-wlm and munge."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root, and apt-get install slurm-wlm munge ({' '.join(missing)})")
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), size=4) as cluster:
        yield cluster
