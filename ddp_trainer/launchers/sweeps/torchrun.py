"""``hydra/launcher=torchrun``: runs each job of a sweep in its own torchrun on this machine."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import POSITIVE, ConfigError, TransientError, require, setting
from ddp_trainer.config.schema import Device
from ddp_trainer.cores import usable_cores
from ddp_trainer.distributed.environment import read_environment, visible_gpus
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.launchers.job_file import write_job
from ddp_trainer.launchers.sweeps.base import Job, JobLauncher, last_error

POLL_SECONDS = 0.1
STOP = "stop"
"""The name of the file whose creation stops all jobs of a sweep gracefully."""


@dataclass
class TorchrunLauncherConfig:
    """The options ``hydra.launcher.…`` of ``hydra/launcher=torchrun``."""

    _target_: str = "hydra_plugins.ddp_trainer.TorchrunLauncher"
    nproc_per_node: int | None = setting(None, POSITIVE)
    """Ranks per job; null: one per GPU of the job, or without GPUs usable cores / max_parallel."""
    max_parallel: int = setting(1, POSITIVE)
    """Number of jobs that run at the same time; GPUs and cores are split between them."""


class TorchrunLauncher(JobLauncher):
    """Runs each job in a torchrun, `max_parallel` at a time; Ctrl-C stops all jobs gracefully."""

    def __init__(self, nproc_per_node: int | None, max_parallel: int) -> None:
        self.nproc_per_node = nproc_per_node
        self.max_parallel = max_parallel

    @cached_property
    def gpus(self) -> list[str]:
        """The names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
        import torch  # here, because the import takes seconds and CPU jobs do not need it

        return visible_gpus(torch.cuda.device_count())

    def gpus_of(self, device: Device, slot: int) -> list[str]:
        """Return the GPUs of `slot`, 0 to ``max_parallel - 1``; an empty list for device=cpu."""
        if device is Device.cpu:
            return []
        share = len(self.gpus) // self.max_parallel
        return self.gpus[slot * share : (slot + 1) * share]

    def world_size(self, device: Device) -> int:
        require(
            device is Device.cpu or not self.gpus or self.max_parallel <= len(self.gpus),
            f"hydra.launcher.max_parallel={self.max_parallel} must be at most the number of GPUs,"
            f" {len(self.gpus)}: lower it, because each job needs a GPU, or set device=cpu",
        )
        return (
            self.nproc_per_node
            or len(self.gpus_of(device, 0))
            or max(1, usable_cores() // self.max_parallel)
        )

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = iter(jobs)
        with (
            tempfile.TemporaryDirectory(prefix="ddp_trainer-") as folder,
            GracefulStop(read_environment().stop_file) as stop,
            ThreadPoolExecutor(self.max_parallel) as pool,
        ):

            def run_jobs(slot: int) -> None:
                while not stop.is_set and (job := next(waiting, None)):
                    self.run_job(job, slot, Path(folder))

            workers = [pool.submit(run_jobs, slot) for slot in range(self.max_parallel)]
            while wait(workers, timeout=POLL_SECONDS).not_done:
                if stop.poll():
                    Path(folder, STOP).touch()
            for worker in workers:
                worker.result()  # raises the worker's exception
        if stop.is_set:
            done = sum(isinstance(job.result, float) for job in jobs)
            print(
                f"stopped, {done} of {len(jobs)} jobs are done: the same command continues",
                flush=True,
            )
            sys.exit(0)

    def run_job(self, job: Job, slot: int, folder: Path) -> None:
        """Run a job on share `slot` of the GPUs, print its output, and set its result.

        folder: the folder for the job file and the output of the job.
        """
        log = folder / f"job-{job.number}.log"
        try:
            torchrun = self.start(job, slot, log)
        except (OSError, ConfigError, TransientError) as error:  # a full disk, for example
            return job.finish(f"torchrun could not be started: {error}")
        prefix = f"{job.number}: " if self.max_parallel > 1 else ""
        code = None
        with open(log, errors="replace") as output:
            while code is None:
                time.sleep(POLL_SECONDS)
                code = torchrun.poll()
                text = "".join(f"{prefix}{line}" for line in output)
                with suppress(OSError):  # a lost terminal must not end the sweep
                    print(text, end="", flush=True)
        failure = last_error(log) or f"torchrun ended with exit code {code}"
        job.finish(failure if code else None)

    def start(self, job: Job, slot: int, log: Path) -> subprocess.Popen[bytes]:
        """Start torchrun for a job on share `slot` of the GPUs, and return the process.

        torchrun writes to the file `log`, because other programs, such as wandb's service, may keep
        a pipe open after torchrun has ended.
        """
        config = job.config
        ranks = self.world_size(config.device)
        if self.max_parallel > 1 and config.num_threads == "auto":
            config = replace(
                config, num_threads=max(1, usable_cores() // self.max_parallel // ranks)
            )
        job_file = log.with_suffix(".json")
        write_job(job_file, to_builtins(config), job.run_dir)
        variables = {
            "OMP_NUM_THREADS": "1",  # or torchrun prints a warning
            "DDP_TRAINER_STOP_FILE": str(log.with_name(STOP)),
            "DDP_TRAINER_COMMAND": shlex.join(["python", "-m", "ddp_trainer", *sys.argv[1:]]),
        }
        if gpus := self.gpus_of(config.device, slot):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with suppress(OSError):
            print(f"{job.label}: nproc_per_node={ranks}, {job.run_dir}", flush=True)
        with open(log, "wb") as output:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ddp_trainer.launchers.agent",
                    f"--nproc-per-node={ranks}",
                    "--rdzv-backend=bound",
                    "--rdzv-endpoint=127.0.0.1:0",
                    "-m",
                    "ddp_trainer",
                    "train",
                    f"job_file={job_file}",
                ],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # so that Ctrl-C reaches only this program, which stops its jobs gracefully
                start_new_session=True,
            )
