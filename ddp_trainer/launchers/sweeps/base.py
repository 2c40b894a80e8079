"""The base class of the launchers: it composes and checks the jobs of a sweep, and returns their
results.
"""

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
        """Set `result`: best top-1 from summary.json, or an error if there is a `failure` or the
        job was stopped.
        """
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
    """Composes and checks the jobs of a sweep, runs them, and returns the best top-1 of
    each job.
    """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what `launch` needs; ConfigError if an option is bad, or if torchrun has started
        this process.
        """
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
        """Return the number of ranks of a job on `device`; ConfigError if the launcher's options do
        not allow it.
        """

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> None:
        """Run all `jobs` and set their results; a failed job must not end others. Exits if the user
        stops the sweep.
        """

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
        results = [
            outcome if isinstance(outcome, JobError) else outcome.result for outcome in outcomes
        ]
        if failed := [str(result) for result in results if isinstance(result, JobError)]:
            print(
                f"{len(failed)} of {len(results)} jobs failed: {'; '.join(failed)}",
                file=sys.stderr,
                flush=True,
            )
        return [
            Return(overrides, status=JobStatus.COMPLETED, _return_value=result)
            for overrides, result in zip(job_overrides, results, strict=True)
        ]

    def compose(self, overrides: list[str], number: int, jobs: dict[Path, Job]) -> Job | JobError:
        """Return job `number`, and add it to `jobs` under its run directory; if its config is bad,
        return the error.
        """
        swept = [
            override for override in overrides if override not in self.config.hydra.overrides.task
        ]
        label = f"job {number} ({' '.join(swept)})" if swept else f"job {number}"
        try:
            composed = self.loader.load_sweep_config(self.config, overrides)
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
            HydraConfig.instance().set_config(composed)
            config = to_config(
                OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
            )
            config.check_world_size(self.world_size(config.device))
            job = Job(
                number=number,
                label=label,
                config=config,
                run_dir=job_dir(config.output_dir, config.name),
            )
            # a sweeper may propose a job twice: the job runs once
            first = jobs.setdefault(job.run_dir, job)
            fix = "sweep over keys that change the training (device does not, for example)"
            require(
                first.config == config,
                f"{job.run_dir} is the run directory of {first.label} too: {fix}",
            )
            return first
        except (ConfigError, OmegaConfBaseException, HydraException) as error:
            failure = JobError(f"{label} cannot run: {format_config_error(error, overrides)}")
            failure.__cause__ = error
            return failure


class Return(JobReturn):
    """The result of a job. If the job failed, `return_value` raises the error; Hydra's class would
    also print it.
    """

    @property
    def return_value(self) -> Any:  # type: ignore[override]
        if isinstance(self._return_value, JobError):
            raise self._return_value
        return self._return_value


def last_error(log: Path) -> str | None:
    """Return the text after "error: " in the last such line of the file `log`; None if it
    has none.
    """
    errors = re.findall(
        r"^error: (.+)", log.read_text(errors="replace") if log.exists() else "", re.MULTILINE
    )
    return errors[-1] if errors else None
