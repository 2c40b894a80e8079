"""``hydra/launcher=slurm``: submits launch/slurm.sbatch for each job of a sweep.

It does not use submitit, because submitit runs pickled functions and has its own way to requeue.
"""

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_trainer.config.composition import config_digest, config_dir, to_builtins
from ddp_trainer.config.errors import POSITIVE, ConfigError, JobError, TransientError, setting
from ddp_trainer.config.schema import Device
from ddp_trainer.launchers.job_file import write_job
from ddp_trainer.launchers.sweeps.base import Job, JobLauncher, last_error


@dataclass
class SlurmLauncherConfig:
    """The options ``hydra.launcher.…`` of ``hydra/launcher=slurm``; null: the default of SLURM."""

    _target_: str = "hydra_plugins.ddp_trainer.SlurmLauncher"
    nodes: int = setting(1, POSITIVE)
    """Number of nodes per job."""
    gpus_per_node: int | None = setting(None, POSITIVE)
    """GPUs on each node, one rank per GPU."""
    ntasks_per_node: int | None = setting(None, POSITIVE)
    """Ranks on each node without GPUs."""
    cpus_per_task: int | None = setting(None, POSITIVE)
    """Cores per SLURM task; without ntasks_per_node a node has one task, also with several GPUs."""
    time: str | None = None
    """Time limit of a job, in minutes or as 'hours:minutes:seconds'; the job is then requeued."""
    partition: str | None = None
    """SLURM partition of the jobs."""
    sbatch_args: list[str] = setting([])
    """Further arguments of sbatch, such as --account=me."""
    poll_seconds: float = setting(5.0, POSITIVE)
    """Seconds between two calls of squeue, which lists the jobs that have not ended."""


class SlurmLauncher(JobLauncher):
    """Submits each job to SLURM, and waits until all jobs have left the queue.

    Ctrl-C ends this program, but not the jobs; the same command then waits for the jobs again.
    """

    def __init__(self, sbatch_args: Sequence[str], poll_seconds: float, **options: Any) -> None:
        self.sbatch_args = list(sbatch_args)
        self.poll_seconds = poll_seconds
        self.options = options

    def world_size(self, device: Device) -> int:
        ranks_per_node = self.options["gpus_per_node"] or self.options["ntasks_per_node"] or 1
        return self.options["nodes"] * ranks_per_node

    def run(self, jobs: Sequence[Job]) -> None:
        submitted: dict[str, Job] = {}
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            queued = queued_jobs()
            for job in jobs:
                try:
                    submitted[self.submit(job, queued)] = job
                except (ConfigError, TransientError) as error:
                    if not submitted:
                        raise
                    job.finish(str(error))
            while submitted:
                time.sleep(self.poll_seconds)
                # SLURM's controller is busy or restarts, but it keeps the jobs: ask again
                with suppress(TransientError):
                    for job_id in submitted.keys() - queued_jobs().values():
                        self.finish(job_id, submitted.pop(job_id))
        except KeyboardInterrupt:
            if submitted:
                fix = (
                    f"scancel {' '.join(submitted)} ends them, and the same command waits for them"
                )
                print(f"the jobs stay in SLURM: {fix}", flush=True)
            sys.exit(1)

    def submit(self, job: Job, queued: dict[str, str]) -> str:
        """Submit a job, unless it is in `queued` (ids by name) already, and return its SLURM id."""
        job_file, log = files_of(job)
        if job_id := queued.get(job_file.stem):
            print(f"{job.label}: already in SLURM as {job_id}, {log}", flush=True)
            with suppress(OSError):
                job.began = job_file.stat().st_mtime  # when it was submitted
            return job_id
        write_job(job_file, to_builtins(job.config), job.run_dir)
        log.unlink(missing_ok=True)  # because slurm.sbatch makes SLURM append to it
        options = {"job_name": job_file.stem, "output": log} | self.options
        flags = [
            f"--{key.replace('_', '-')}={value}"
            for key, value in options.items()
            if value is not None
        ]
        script = config_dir().parent / "launch" / "slurm.sbatch"
        answer = slurm(
            "sbatch", "--parsable", *flags, *self.sbatch_args, str(script), f"base={job_file}"
        )
        job_id = answer.partition(";")[0]  # sbatch may print ID;CLUSTER
        print(f"{job.label}: SLURM job {job_id}, {log}", flush=True)
        return job_id

    def finish(self, job_id: str, job: Job) -> None:
        """Set and print the result of a job that has left the queue."""
        log = files_of(job)[1]
        state = ""
        with suppress(TransientError):
            state = slurm("squeue", f"--jobs={job_id}", "--states=all", "--noheader", "--format=%T")
        failure = last_error(log) or f"SLURM job {job_id} ended as {state}, see {log}"
        job.finish(None if state in ("COMPLETED", "") else failure)
        is_failed = isinstance(job.result, JobError)
        print(f"failed: {job.result}" if is_failed else f"{job.label}: done", flush=True)


def files_of(job: Job) -> tuple[Path, Path]:
    """Return the paths of a job's job file and log: the job's name in SLURM with .json and .log.

    The name depends only on the job, so that a repeated sweep finds the job in the queue.
    """
    identity = f"{config_digest(job.config)} {job.run_dir.absolute()}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', job.config.name)}-{digest}"
    folder = Path(job.config.output_dir).expanduser().absolute() / ".slurm"
    return folder / f"{name}.json", folder / f"{name}.log"


def queued_jobs() -> dict[str, str]:
    """Return the SLURM ids of this user's jobs that have not ended, by job name."""
    lines = slurm("squeue", "--me", "--noheader", "--format=%i %j").splitlines()
    return {name: job_id for job_id, _, name in (line.partition(" ") for line in lines)}


def slurm(*command: str) -> str:
    """Run a SLURM command and return its output.

    The command gets no variables of a SLURM job in which this process runs, because a new job would
    inherit them.

    Raises:
        ConfigError: the command is not installed, or sbatch refuses the job.
        TransientError: squeue fails, or SLURM does not answer.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("SLURM_") or key == "SLURM_CONF"
    }
    variables = {"DDP_TRAINER_PYTHON": sys.executable} | kept
    try:
        done = subprocess.run(
            command, env=variables, text=True, capture_output=True, timeout=120, check=True
        )
        return done.stdout.strip()
    except FileNotFoundError:
        raise ConfigError(
            f"hydra/launcher=slurm needs {command[0]}, which is missing: run on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise TransientError(
            f"{command[0]} has not answered for 120 s: check that slurmctld is running"
        ) from None
    except subprocess.CalledProcessError as error:
        kind = ConfigError if command[0] == "sbatch" else TransientError
        raise kind(
            f"hydra/launcher=slurm: {' '.join(error.stderr.split()) or shlex.join(command)}"
        ) from None
