"""The base class of the launchers, which composes and checks the jobs of a sweep."""

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
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer.config.composition import job_dir, to_config
from ddp_trainer.config.errors import ConfigError, JobError, check_values, require
from ddp_trainer.config.messages import format_config_error
from ddp_trainer.config.schema import Config, Device
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.training.summary import Status, Summary


@dataclass(kw_only=True)
class Job:
    """One job of a sweep, and its result."""

    number: int
    label: str
    """The name of the job in messages: its number and the overrides that differ between jobs."""
    config: Config
    run_dir: Path
    result: float | JobError | None = None
    """Best top-1, or the error with which the job failed; None: the job has not run yet."""

    def finish(self, failure: str | None) -> None:
        """Set `result` from summary.json; to an error if there is a `failure` or it was stopped."""
        if failure is None:
            try:
                summary = Summary.from_json((self.run_dir / "summary.json").read_text())
                self.result = summary.best_top1
                if summary.status is Status.stopped:
                    failure = "stopped before its end, with a checkpoint saved"
            except OSError as error:
                failure = f"summary.json cannot be read: {error.strerror}"
            except ValueError as error:
                failure = f"summary.json is damaged: {error}"
        if failure is not None:
            self.result = JobError(f"{self.label} in {self.run_dir}: {failure}")


class JobLauncher(Launcher):
    """Composes and checks the jobs of a sweep, runs them, and returns the best top-1 of each."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store the config; ConfigError if an option is bad or torchrun started this process."""
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
        """Run jobs and return their results. First print the errors of bad configs; if all are bad,
        raise the first.
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
        results = [job.result if isinstance(job, Job) else job for job in outcomes]
        print_failures(results)
        return [
            Return(overrides, status=JobStatus.COMPLETED, _return_value=result)
            for overrides, result in zip(job_overrides, results, strict=True)
        ]

    def compose(self, overrides: list[str], number: int, jobs: dict[Path, Job]) -> Job | JobError:
        """Return job `number`, added to `jobs` by run directory, or the error of its config."""
        task = self.config.hydra.overrides.task
        swept = [override for override in overrides if override not in task]
        label = f"job {number} ({' '.join(swept)})" if swept else f"job {number}"
        try:
            composed = self.loader.load_sweep_config(self.config, overrides)
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
            HydraConfig.instance().set_config(composed)
            keys = [str(key) for key in composed if key != "hydra"]
            config = to_config(OmegaConf.masked_copy(composed, keys))
            config.check_world_size(self.world_size(config.device))
            run_dir = job_dir(config.output_dir, config.name)
            job = Job(number=number, label=label, config=config, run_dir=run_dir)
            # a sweeper may propose a job twice: the job runs once
            first = jobs.setdefault(run_dir, job)
            require(
                first.config == config,
                f"{run_dir} is the run directory of {first.label} too: sweep over keys that change"
                " the training (device does not, for example)",
            )
            return first
        except (ConfigError, OmegaConfBaseException, HydraException) as error:
            failure = JobError(f"{label} cannot run: {format_config_error(error, overrides)}")
            failure.__cause__ = error
            return failure


def print_failures(results: Sequence[object]) -> None:
    """Print the errors among the results of jobs, if there are any."""
    failed = [str(result) for result in results if isinstance(result, JobError)]
    if failed:
        text = f"{len(failed)} of {len(results)} jobs failed: {'; '.join(failed)}"
        print(text, file=sys.stderr, flush=True)


class Return(JobReturn):
    """The result of a job. The error of a failed job is only raised; Hydra would also print it."""

    @property
    def return_value(self) -> Any:  # type: ignore[override]
        if isinstance(self._return_value, JobError):
            raise self._return_value
        return self._return_value


def last_error(log: Path) -> str | None:
    """Return the text after "error: " in the last such line of a file; None if it has none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    errors = re.findall(r"^error: (.+)", text, re.MULTILINE)
    return errors[-1] if errors else None
