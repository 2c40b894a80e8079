"""``hydra/launcher=torchrun``: a torchrun for each job of a sweep, on this machine."""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import require, require_positive
from ddp_trainer.config.schema import Device
from ddp_trainer.distributed.environment import read_environment, torchrun_variables, usable_cores, visible_gpus
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.launch.job_file import write_job
from ddp_trainer.launch.launchers.base import Job, JobLauncher, last_error

POLL_SECONDS = 0.1
KEPT_LINES = 200
"""The last lines of a job's output, in which the cause of its failure is searched."""


@dataclass
class TorchrunLauncherConfig:
    """The options ``hydra.launcher.…`` of ``hydra/launcher=torchrun``."""

    _target_: str = "hydra_plugins.ddp_trainer.TorchrunLauncher"
    nproc_per_node: int | None = None
    """Ranks of a job; null: its number of GPUs, or usable cores / max_parallel where there are none."""
    max_parallel: int = 1
    """Jobs at a time; GPUs and cores are split between them."""


class TorchrunLauncher(JobLauncher):
    """Runs each job under a torchrun of its own, `max_parallel` at a time; Ctrl-C stops them gracefully."""

    NAME = "torchrun"

    def __init__(self, nproc_per_node: int | None, max_parallel: int) -> None:
        self.nproc_per_node, self.max_parallel = nproc_per_node, max_parallel

    @cached_property
    def gpus(self) -> list[str]:
        """The GPUs of this machine."""
        import torch  # takes seconds, and jobs on CPUs do not need it here

        return visible_gpus(torch.cuda.device_count())

    def gpus_of(self, device: Device, slot: int) -> list[str]:
        """Return the GPUs of the job in `slot`, which is less than `max_parallel`."""
        if device is Device.cpu:
            return []
        share = len(self.gpus) // self.max_parallel
        return self.gpus[slot * share : (slot + 1) * share]

    def world_size(self, device: Device) -> int:
        require_positive("hydra.launcher.nproc_per_node", self.nproc_per_node)
        require_positive("hydra.launcher.max_parallel", self.max_parallel)
        require(
            device is Device.cpu or not self.gpus or self.max_parallel <= len(self.gpus),
            f"hydra.launcher.max_parallel={self.max_parallel} must be at most the {len(self.gpus)} GPUs: "
            "each job needs one, so lower it or set device=cpu",
        )
        return self.nproc_per_node or len(self.gpus_of(device, 0)) or max(1, usable_cores() // self.max_parallel)

    def run(self, jobs: Sequence[Job]) -> None:
        stop_file = read_environment().stop_file
        queue = iter(jobs)  # shared by the threads
        with (
            tempfile.TemporaryDirectory(prefix="ddp_trainer-") as name,
            GracefulStop(Path(stop_file) if stop_file else None) as stop,
            ThreadPoolExecutor(self.max_parallel) as pool,
        ):
            folder = Path(name)
            workers = [pool.submit(self.run_jobs, queue, slot, folder) for slot in range(self.max_parallel)]
            while wait(workers, timeout=POLL_SECONDS).not_done:
                if stop.poll():
                    (folder / "stop").touch()
        for worker in workers:
            worker.result()  # raises an error of the thread
        if stop.is_set:
            done = sum(isinstance(job.result, float) for job in jobs)
            print(f"stopped, {done} of {len(jobs)} jobs are done: the same command continues", flush=True)
            sys.exit(0)

    def run_jobs(self, queue: Iterator[Job], slot: int, folder: Path) -> None:
        """Run jobs of the queue one after another until it is empty or a stop is requested; print their output."""
        while not (folder / "stop").exists() and (job := next(queue, None)):
            try:
                torchrun = self.start(job, slot, folder)
            except OSError as error:  # a full disk, for example
                job.finish(f"torchrun could not be started: {error}")
                continue
            prefix = f"{job.number}: " if self.max_parallel > 1 else ""
            lines: deque[str] = deque(maxlen=KEPT_LINES)
            printer = threading.Thread(target=print_lines, args=(torchrun.stdout, prefix, lines), daemon=True)
            printer.start()
            code = torchrun.wait()
            printer.join(timeout=5)  # a process that outlives torchrun, of a logger for example, may hold the pipe open
            failure = last_error("".join(lines)) or f"torchrun ended with exit code {code}"
            job.finish(failure if code else None)

    def start(self, job: Job, slot: int, folder: Path) -> subprocess.Popen[str]:
        """Start the torchrun of a job on the GPUs of `slot`; `folder` is for its temporary files."""
        config, ranks = job.config, self.world_size(job.config.device)
        if self.max_parallel > 1 and config.num_threads == "auto":
            config = replace(config, num_threads=max(1, usable_cores() // self.max_parallel // ranks))
        job_file = folder / f"job-{job.number}.json"
        write_job(job_file, to_builtins(config), job.run_dir)
        variables = torchrun_variables(num_threads=1) | {
            "DDP_TRAINER_STOP_FILE": str(folder / "stop"),
            "DDP_TRAINER_COMMAND": shlex.join(["python", "-m", "ddp_trainer", *sys.argv[1:]]),
        }
        if gpus := self.gpus_of(config.device, slot):
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with suppress(OSError):
            print(f"{job.label}: nproc_per_node={ranks}, {job.run_dir}\n", end="", flush=True)
        return subprocess.Popen(
            [sys.executable, "-m", "ddp_trainer.launch.agent", f"--nproc-per-node={ranks}", "--rdzv-backend=bound",
             "--rdzv-endpoint=127.0.0.1:0", "-m", "ddp_trainer", "train", f"job_file={job_file}"],
            env=os.environ | variables, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C is for the sweep, which stops its jobs gracefully
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def print_lines(lines: Iterable[str], prefix: str, kept: deque[str]) -> None:
    """Print `lines` as they come, each after `prefix`, and add them to `kept`."""
    for line in lines:
        kept.append(line)
        with suppress(OSError):  # a lost terminal must not block the job
            print(f"{prefix}{line}", end="", flush=True)
