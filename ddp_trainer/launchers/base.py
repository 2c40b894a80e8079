"""What our launchers share: the jobs of a sweep are composed and checked here, run elsewhere, and summed up."""

from __future__ import annotations

import copy
import re
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer.command_line import JobError, job_dir
from ddp_trainer.composition import resolve
from ddp_trainer.config import Config, ConfigError, require
from ddp_trainer.environment import read_environment
from ddp_trainer.explain import explain
from ddp_trainer.summary import Status, Summary


@dataclass(kw_only=True)
class Job:
    """A job of a sweep: what it is, and in the end what it came to."""

    number: int
    label: str
    """What messages call it: its number and what tells it from the other jobs."""
    config: Config
    run_dir: Path
    result: float | JobError | None = None
    """Best top-1, or why there is none; None: not run yet."""

    def conclude(self, failure: str | None = None) -> None:
        """Take the result from the run directory, unless `failure` says why there is none."""
        try:
            summary = None if failure else Summary.from_json((self.run_dir / "summary.json").read_text())
        except OSError as error:
            summary, failure = None, f"it left no summary.json: {error.strerror}"
        if summary is not None and summary.status is not Status.stopped:
            self.result = summary.best_top1
        else:
            failure = failure or "stopped before its end, and saved"
            self.result = JobError(f"{self.label} in {self.run_dir}: {failure}")


class JobLauncher(Launcher):
    """Composes jobs in the launching process, runs them as `run` says and returns the best top-1 of each."""

    NAME: str
    """As in hydra/launcher=NAME."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        require(
            not read_environment().under_torchrun,
            f"hydra/launcher={self.NAME} gives each job a torchrun of its own: start the sweep with plain "
            "python -m ddp_trainer, or leave it out to run the jobs one after another under this torchrun",
        )
        self.check_options()
        self.config = config
        self.loader: ConfigLoader = hydra_context.config_loader

    @abstractmethod
    def check_options(self) -> None:
        """Check the launcher's own options; in its constructor Hydra would wrap what is raised.

        Raises:
            ConfigError: a rule is broken.
        """

    @abstractmethod
    def check(self, config: Config) -> None:
        """Check what depends on how this launcher runs a job.

        Raises:
            ConfigError: a rule is broken.
        """

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> None:
        """Run `jobs` and conclude each; one that fails must not end the others.

        Raises:
            SystemExit: the user stopped the sweep.
        """

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs of one batch; those whose config is at fault are refused at once and the others run.

        Raises:
            ConfigError, OmegaConfBaseException, HydraException: the configs of all are at fault.
        """
        jobs: dict[Path, Job] = {}
        composed = [
            self.compose(list(overrides), number, jobs)
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        refused = [job for job in composed if isinstance(job, JobError)]
        if refused and not jobs:
            raise refused[0].__cause__ or refused[0]
        for refusal in refused:
            print(f"error: {refusal}", file=sys.stderr, flush=True)
        self.run(list(jobs.values()))
        results = [job.result if isinstance(job, Job) else job for job in composed]
        sum_up(results)
        return [as_return(result, overrides) for result, overrides in zip(results, job_overrides, strict=True)]

    def compose(self, overrides: list[str], number: int, jobs: dict[Path, Job]) -> Job | JobError:
        """Return the job that `overrides` make and enter it into `jobs`, by run directory; or return the refusal.

        A sampler may propose the same twice: that is one job with one result.
        """
        swept = [override for override in overrides if override not in self.config.hydra.overrides.task]
        label = f"job {number} ({' '.join(swept)})" if swept else f"job {number}"
        try:
            composed = self.loader.load_sweep_config(self.config, overrides)
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
            HydraConfig.instance().set_config(composed)
            settings = copy.deepcopy(composed)
            with open_dict(settings):
                del settings["hydra"]
            config = resolve(settings)
            self.check(config)
            job = Job(number=number, label=label, config=config, run_dir=job_dir(config))
            first = jobs.setdefault(job.run_dir, job)
            require(
                first.config == config,
                f"{job.run_dir} is the run directory of {first.label} too: sweep over what changes the training",
            )
            return first
        except (ConfigError, OmegaConfBaseException, HydraException) as error:
            failure = JobError(f"{label} is refused: {explain(error, overrides)}")
            failure.__cause__ = error
            return failure


class FailedReturn(JobReturn):
    """Raises the failure where a sweeper asks for the result, as Hydra's own does after printing what we have told."""

    @property
    def return_value(self) -> Any:
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def as_return(result: float | JobError | None, overrides: Sequence[str]) -> JobReturn:
    """Return what a sweeper gets of a job."""
    if isinstance(result, JobError):
        return FailedReturn(overrides=overrides, status=JobStatus.FAILED, _return_value=result)
    return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=result)


def sum_up(results: Sequence[float | JobError | None]) -> None:
    """Name the jobs that failed, in one line."""
    if failed := [str(result) for result in results if isinstance(result, JobError)]:
        print(f"{len(failed)} of {len(results)} jobs failed: {'; '.join(failed)}", file=sys.stderr, flush=True)


CAUSE = re.compile(
    r"^error: (?P<refusal>.+)|"
    r"rank \d+ on \S+ (?:failed first|was lost|has not answered).*(?:\n *(?P<raised>\w[\w.]*: .+))?",
    re.MULTILINE,
)
"""How a launch tells what ended it: in one line of ours, or at the end of torchrun's block."""


def cause_in(output: str) -> str | None:
    """Return in one line what a launch that failed said of the cause, if it did."""
    told = list(CAUSE.finditer(output))
    return (told[-1]["refusal"] or told[-1]["raised"] or told[-1][0]) if told else None
