"""The base class of the launchers, which composes and checks the jobs of a sweep."""

import re
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer.config.composition import job_dir, to_config
from ddp_trainer.config.errors import ConfigError, JobError, check_values, require
from ddp_trainer.config.messages import format_config_error
from ddp_trainer.config.schema import Config, Device
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.launchers.job_file import summary_since
from ddp_trainer.launchers.sweeps.results import RESULTS, Row, score_of
from ddp_trainer.training.summary import Status


@dataclass(kw_only=True)
class Job:
    """One job of a sweep, and its result."""

    number: int
    label: str
    """The name of the job in messages: its number and the overrides that differ between jobs."""
    config: Config
    run_dir: Path
    overrides: list[str]
    """The overrides of the job, ``key=value``."""
    result: float | JobError | None = None
    """The best score, or the error with which the job failed; None: the job has not run yet."""
    seconds: float | None = None
    """The time of training and evaluation; None: unknown."""
    began: float = field(default_factory=time.time)
    """Unix seconds; an older summary.json is that of an earlier launch."""

    def finish(self, failure: str | None) -> None:
        """Set `result` from summary.json, or to an error if the job failed or was stopped.

        failure: the reason why the job failed; None: it ended without an error.
        """
        if failure is None:
            try:
                summary = summary_since(self.began, self.run_dir)
                self.result = score_of(summary)
                self.seconds = summary.seconds
                if summary.status is Status.stopped:
                    failure = "stopped before its end, with a checkpoint saved"
            except (OSError, ValueError) as error:
                failure = f"summary.json cannot be used: {error}"
        if failure is not None:
            self.result = JobError(f"{self.label} in {self.run_dir}: {failure}")

    def row(self) -> Row:
        """Return the row of this job in the table of results."""
        return Row(
            overrides=self.overrides,
            run_dir=self.run_dir,
            score=self.result if isinstance(self.result, float) else None,
            select_by=self.config.select_by,
            is_higher_better=self.config.is_higher_better(self.config.select_by),
            seconds=self.seconds,
        )


class JobLauncher(Launcher):
    """Composes and checks the jobs of a sweep, runs them, and returns the best score of each."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the config; ConfigError if an option is wrong or torchrun started this process."""
        launcher = config.hydra.runtime.choices["hydra/launcher"]
        require(
            not read_environment().under_torchrun,
            f"hydra/launcher={launcher} starts a torchrun for each job: start the sweep with plain"
            " python -m ddp_trainer, or leave hydra/launcher out to run the jobs one after another"
            " in this torchrun",
        )
        check_values(OmegaConf.to_object(config.hydra.launcher), "hydra.launcher.")
        self.config = config
        self.loader: ConfigLoader = hydra_context.config_loader

    @abstractmethod
    def world_size(self, device: Device) -> int:
        """Return the number of ranks of a job; ConfigError if the options do not allow `device`."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> None:
        """Run all `jobs` and set their results, even if some fail; exit if the user stops them."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs of a sweep, and return a result for each.

        A job with a wrong config does not run: its error is printed before the others start. If the
        configs of all jobs are wrong, the first error is raised.
        """
        jobs: dict[Path, Job] = {}
        numbered = enumerate(job_overrides, initial_job_idx)
        outcomes = [self.compose(list(overrides), number, jobs) for number, overrides in numbered]
        errors = [outcome for outcome in outcomes if isinstance(outcome, JobError)]
        if errors and not jobs:
            raise errors[0].__cause__ or errors[0]
        for error in errors:
            print(f"error: {error}", file=sys.stderr, flush=True)
        self.run(list(jobs.values()))
        for job in jobs.values():
            RESULTS[job.run_dir] = job.row()
        results = [job.result if isinstance(job, Job) else job for job in outcomes]
        failed = [str(result) for result in results if isinstance(result, JobError)]
        if failed:
            text = f"{len(failed)} of {len(results)} jobs failed: {'; '.join(failed)}"
            print(text, file=sys.stderr, flush=True)
        return [
            Return(overrides, status=JobStatus.COMPLETED, _return_value=result)
            for overrides, result in zip(job_overrides, results, strict=True)
        ]

    def compose(self, overrides: list[str], number: int, jobs: dict[Path, Job]) -> Job | JobError:
        """Return job `number` and add it to `jobs`, or return the error of its config.

        If `jobs` already has a job with the same config, that job is returned.
        """
        task = self.config.hydra.overrides.task
        swept = [override for override in overrides if override not in task]
        label = f"job {number} ({' '.join(swept)})" if swept else f"job {number}"
        try:
            composed = self.loader.load_sweep_config(self.config, overrides)
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
                HydraConfig.instance().set_config(composed)
                del composed.hydra  # this section is not part of `Config`
            config = to_config(composed)
            config.check_world_size(self.world_size(config.device))
            run_dir = job_dir(config.output_dir, config.name)
            job = Job(
                number=number, label=label, config=config, run_dir=run_dir, overrides=overrides
            )
            # a sweeper may propose the same job twice, which then runs once
            first = jobs.setdefault(run_dir, job)
            require(
                first.config == config,
                f"{run_dir} is the run directory of {first.label} too, because some keys, such as"
                " device and max_steps, are part of its name only if the command line or"
                " hydra.sweeper.params gives them several values: do so, or sweep over other keys",
            )
            return first
        except (ConfigError, OmegaConfBaseException, HydraException) as error:
            failure = JobError(f"{label} cannot run: {format_config_error(error, overrides)}")
            failure.__cause__ = error
            return failure


class Return(JobReturn):
    """The result of a job. The error of a failed job is only raised; Hydra would also print it."""

    @property
    def return_value(self) -> Any:  # type: ignore[override]
        if isinstance(self._return_value, JobError):
            raise self._return_value
        return self._return_value


def last_error(log: Path) -> str | None:
    """Return the rest of the last line of `log` that begins with "error: "; None without one."""
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = re.findall(r"^error: (.+)", text, re.MULTILINE)
    return errors[-1] if errors else None
