"""``hydra/launcher=torchrun``: each job of a sweep is a torchrun of its own on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ddp_trainer.config import Config, Device, require, require_positive
from ddp_trainer.environment import read_environment, torchrun_variables, usable_cores, visible_gpus
from ddp_trainer.interrupt import SoftStop
from ddp_trainer.job import write_job
from ddp_trainer.launchers.base import Job, JobLauncher, cause_in

POLL_SECONDS = 0.1
KEPT_LINES = 200
"""So much of a job's output is searched for the cause of its failure."""


@dataclass
class TorchrunLauncherConfig:
    """The options ``hydra.launcher.…`` of ``hydra/launcher=torchrun``."""

    _target_: str = "hydra_plugins.ddp_trainer.TorchrunLauncher"
    nproc_per_node: int | None = None
    """Ranks of a job; null: the GPUs that a job has, or usable cores / max_parallel where there are none."""
    max_parallel: int = 1
    """Jobs at a time; GPUs and cores are split between them."""


class TorchrunLauncher(JobLauncher):
    """Runs each job under a torchrun of its own, `max_parallel` at a time."""

    NAME = "torchrun"

    def __init__(self, nproc_per_node: int | None, max_parallel: int) -> None:
        self.nproc_per_node, self.max_parallel = nproc_per_node, max_parallel

    @cached_property
    def gpus(self) -> list[str]:
        """The GPUs here. Importing torch takes seconds: only if a job may use one."""
        import torch

        return visible_gpus(torch.cuda.device_count())

    def gpus_of(self, config: Config, slot: int) -> list[str]:
        """Return the GPUs of the job that runs as number `slot` of those at a time."""
        if config.device is Device.cpu:
            return []
        share = len(self.gpus) // self.max_parallel
        return self.gpus[slot * share : (slot + 1) * share]

    def num_ranks(self, config: Config) -> int:
        """Return how many ranks a job gets."""
        cores = max(1, usable_cores() // self.max_parallel)
        return self.nproc_per_node or len(self.gpus_of(config, 0)) or cores

    def check_options(self) -> None:
        require_positive("hydra.launcher.nproc_per_node", self.nproc_per_node)
        require_positive("hydra.launcher.max_parallel", self.max_parallel)

    def check(self, config: Config) -> None:
        require(
            config.device is Device.cpu or not self.gpus or self.max_parallel <= len(self.gpus),
            f"hydra.launcher.max_parallel={self.max_parallel} must be at most the {len(self.gpus)} GPUs: "
            "each job needs one, so lower it or set device=cpu",
        )
        config.check_world_size(self.num_ranks(config))

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = deque(jobs)
        running: dict[int, Torchrun] = {}
        outer = read_environment().stop_file
        with (
            tempfile.TemporaryDirectory(prefix="ddp_trainer-") as name,
            SoftStop(Path(outer) if outer else None) as stop,
        ):
            folder = Path(name)
            try:
                while running or (waiting and not stop.poll()):
                    for slot in range(self.max_parallel):
                        if slot not in running and waiting and not stop.poll():
                            running[slot] = self.start(waiting.popleft(), slot, folder)
                        elif slot in running and running[slot].has_ended():
                            del running[slot]
                    if stop.poll():
                        (folder / "stop").touch()
                    time.sleep(POLL_SECONDS)
            finally:
                for torchrun in running.values():  # only after an error of our own
                    torchrun.end()
        if stop.is_set:
            done = sum(isinstance(job.result, float) for job in jobs)
            print(f"stopped, {done} of {len(jobs)} jobs done: the same command goes on", flush=True)
            sys.exit(0)

    def start(self, job: Job, slot: int, folder: Path) -> Torchrun:
        """Start a job; `folder` takes what it needs while it runs."""
        config, ranks = job.config, self.num_ranks(job.config)
        threads = config.num_threads
        if not isinstance(threads, int):
            threads = max(1, usable_cores() // self.max_parallel // ranks)
            if self.max_parallel > 1:  # a job by itself finds out, and can be run again elsewhere
                config = replace(config, num_threads=threads)
        file = folder / f"job-{job.number}.json"
        write_job(file, config, job.run_dir)
        environment = torchrun_variables(threads) | {
            "DDP_TRAINER_STOP_FILE": str(folder / "stop"),
            "DDP_TRAINER_COMMAND": shlex.join(["python", "-m", "ddp_trainer", *sys.argv[1:]]),
        }
        if gpus := self.gpus_of(config, slot):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        print(f"{job.label}: {job.run_dir}, {ranks} rank{'s' if ranks > 1 else ''}", flush=True)
        return Torchrun(job, file, ranks, environment, prefix=f"{job.number}: " if self.max_parallel > 1 else "")


class Torchrun:
    """A running job. Its output is passed on line by line, and the end of it kept."""

    def __init__(self, job: Job, file: Path, ranks: int, environment: dict[str, str], *, prefix: str) -> None:
        self.job, self.prefix = job, prefix
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddp_trainer.agent", "--standalone", f"--nproc_per_node={ranks}",
             "-m", "ddp_trainer.job", "run", str(file)],
            env=os.environ | environment, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C is for the sweep: it stops its jobs softly
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.reader = threading.Thread(target=self.pass_on, daemon=True)
        self.reader.start()

    def pass_on(self) -> None:
        """Print what the job says as it says it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.kept.append(line)
            with suppress(BrokenPipeError):  # nobody listens any more: that must not block the job
                print(f"{self.prefix}{line}", end="", flush=True)

    def has_ended(self) -> bool:
        """Say whether the job has ended, and conclude it then."""
        if (code := self.process.poll()) is None:
            return False
        self.reader.join(timeout=5)  # a process that outlived torchrun could hold the pipe open
        failure = cause_in("".join(self.kept)) or f"torchrun ended with exit code {code}"
        self.job.conclude(failure if code else None)
        return True

    def end(self) -> None:
        """End the job: torchrun passes the signal on to its ranks, which save and exit."""
        self.process.terminate()
        self.process.wait()
