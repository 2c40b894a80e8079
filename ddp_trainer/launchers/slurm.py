"""``hydra/launcher=slurm``: each job of a sweep is an sbatch of its own, through launch/slurm.sbatch.

Not built on submitit: it sends pickled callables through a script and requeueing of its own, and here every way of
launching executes the same script with a job file.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_trainer.composition import digest
from ddp_trainer.config import Config, ConfigError, require_positive
from ddp_trainer.job import write_job
from ddp_trainer.launchers.base import Job, JobLauncher, cause_in


@dataclass
class SlurmLauncherConfig:
    """The options ``hydra.launcher.…`` of ``hydra/launcher=slurm``; null leaves a choice to SLURM and the script."""

    _target_: str = "hydra_plugins.ddp_trainer.SlurmLauncher"
    nodes: int = 1
    """Nodes of a job."""
    gpus_per_node: int | None = None
    """GPUs on each node, a rank for each."""
    ntasks_per_node: int | None = None
    """Ranks on each node that has no GPUs."""
    cpus_per_task: int | None = None
    """Cores of a rank."""
    time: str | None = None
    """Limit of a job, as sbatch takes it: minutes, or 'hours:minutes:seconds'; an unfinished job is requeued."""
    partition: str | None = None
    """Where jobs are queued."""
    sbatch_args: list[str] = field(default_factory=list)
    """More arguments of sbatch, such as --account=me."""
    poll_seconds: float = 5.0
    """How often SLURM is asked which jobs are still there."""


class SlurmLauncher(JobLauncher):
    """Submits each job, waits until SLURM has none of them any more, and takes the results.

    The jobs are SLURM's: Ctrl-C ends the waiting, not them, and the same command waits for them again.
    """

    NAME = "slurm"

    def __init__(
        self,
        nodes: int,
        gpus_per_node: int | None,
        ntasks_per_node: int | None,
        cpus_per_task: int | None,
        time: str | None,
        partition: str | None,
        sbatch_args: Sequence[str],
        poll_seconds: float,
    ) -> None:
        self.poll_seconds = poll_seconds
        self.sbatch_args = list(sbatch_args)
        self.options = {
            "nodes": nodes,
            "gpus-per-node": gpus_per_node,
            "ntasks-per-node": ntasks_per_node,
            "cpus-per-task": cpus_per_task,
            "time": time,
            "partition": partition,
        }

    def check_options(self) -> None:
        for option in ("nodes", "gpus-per-node", "ntasks-per-node", "cpus-per-task"):
            require_positive(f"hydra.launcher.{option.replace('-', '_')}", self.options[option])
        require_positive("hydra.launcher.poll_seconds", self.poll_seconds)

    def check(self, config: Config) -> None:
        on_a_node = self.options["gpus-per-node"] or self.options["ntasks-per-node"] or 1
        config.check_world_size(self.options["nodes"] * on_a_node)

    def run(self, jobs: Sequence[Job]) -> None:
        submitted: dict[str, Job] = {}
        try:
            self.submit_all(jobs, submitted)
            self.wait(submitted)
        except KeyboardInterrupt:
            left = " ".join(submitted)
            print(f"SLURM goes on with {left}: to end them, scancel {left}; the same command waits again", flush=True)
            sys.exit(1)

    def submit_all(self, jobs: Sequence[Job], submitted: dict[str, Job]) -> None:
        """Submit `jobs` and enter them into `submitted`, by id.

        Raises:
            ConfigError: SLURM refuses the first.
        """
        queued = jobs_in_queue()
        for job in jobs:
            try:
                submitted[self.submit(job, queued)] = job
            except ConfigError as error:
                if not submitted:
                    raise
                job.conclude(str(error))

    def submit(self, job: Job, queued: dict[str, str]) -> str:
        """Return the SLURM id of a job: of the one that this command submitted before, if that is still queued."""
        name, file, log = files_of(job)
        if name in queued:
            print(f"{job.label}: SLURM has it already as {queued[name]}, {log}", flush=True)
            return queued[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_job(file, job.config, job.run_dir)
        log.unlink(missing_ok=True)  # SLURM appends to it, for a job may be requeued
        options = [f"--{option}={value}" for option, value in self.options.items() if value is not None]
        job_id = slurm(
            "sbatch", "--parsable", f"--job-name={name}", f"--output={log}", *options, *self.sbatch_args,
            str(script()), f"--from={file}",
        ).partition(";")[0]  # fmt: skip
        print(f"{job.label}: SLURM job {job_id}, {log}", flush=True)
        return job_id

    def wait(self, submitted: dict[str, Job]) -> None:
        """Conclude the jobs as they end, and take them out of `submitted`."""
        is_warned = False
        while submitted:
            time.sleep(self.poll_seconds)
            try:
                queued = set(jobs_in_queue().values())
            except ConfigError as error:  # the controller is busy or being restarted: it keeps the jobs
                if not is_warned:
                    print(f"waiting for SLURM to answer again: {error}", file=sys.stderr, flush=True)
                is_warned = True
                continue
            for job_id in submitted.keys() - queued:
                job = submitted.pop(job_id)
                job.conclude(failure_of(job_id, files_of(job)[2]))
                print(f"{job.label}: {job.result if isinstance(job.result, Exception) else 'done'}", flush=True)


def files_of(job: Job) -> tuple[str, Path, Path]:
    """Return a job's name in SLURM, the same for the same config and run directory, its job file and its output."""
    what = hashlib.sha256(f"{digest(job.config)} {job.run_dir.absolute()}".encode()).hexdigest()
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', job.config.name)}-{what[:12]}"
    folder = Path(job.config.output_dir).expanduser().absolute() / ".slurm"
    return name, folder / f"{name}.json", folder / f"{name}.log"


def failure_of(job_id: str, log: Path) -> str | None:
    """Return why a job that has left the queue failed; None if it did not, or SLURM has forgotten it."""
    try:
        record = slurm("scontrol", "--oneliner", "show", "job", job_id)
    except ConfigError:
        return None
    state = dict(word.split("=", 1) for word in record.split() if "=" in word).get("JobState", "COMPLETED")
    if state == "COMPLETED":
        return None
    said = cause_in(log.read_text(errors="replace")) if log.exists() else None
    return said or f"SLURM job {job_id} ended as {state}, see {log}"


def jobs_in_queue() -> dict[str, str]:
    """Return the ids of this user's jobs that SLURM has not ended yet, by name."""
    lines = slurm("squeue", "--me", "--noheader", "--format=%i %j").splitlines()
    return {name: job_id for job_id, _, name in (line.partition(" ") for line in lines)}


def slurm(*command: str) -> str:
    """Return what a command of SLURM's printed.

    Raises:
        ConfigError: it is not installed, or refused; says why.
    """
    try:
        done = subprocess.run(command, env=outside_of_jobs(), text=True, capture_output=True, timeout=120)
    except FileNotFoundError:
        raise ConfigError(
            f"hydra/launcher=slurm needs {command[0]}, which is not here: start it on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} has not answered for 120 s: is slurmctld up?") from None
    if done.returncode != 0:
        raise ConfigError(f"hydra/launcher=slurm: {' '.join(done.stderr.split()) or shlex.join(command)}")
    return done.stdout.strip()


def outside_of_jobs() -> dict[str, str]:
    """Return this environment without what SLURM has put there, should the sweep run in a job, and with our Python."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    return {"DDP_TRAINER_PYTHON": sys.executable} | kept


def script() -> Path:
    """Return launch/slurm.sbatch: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package, package.parent):
        if (path := folder / "launch" / "slurm.sbatch").is_file():
            return path
    raise FileNotFoundError(f"launch/slurm.sbatch is neither in {package} nor beside it: reinstall ddp_trainer")
