"""Compose and check a config, write it to a job file, and print its run directory.

The launch scripts, and sweeps with hydra/launcher=torchrun or slurm, train from job files, so that
a wrong config is reported once, before any rank starts.
"""

from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.commands.options import parse_options
from ddp_trainer.config.composition import from_builtins, to_builtins
from ddp_trainer.config.errors import POSITIVE, config_class, require, setting
from ddp_trainer.config.keys import change_keys
from ddp_trainer.config.schema import Config
from ddp_trainer.launchers.job_file import read_job, write_job


@config_class
class FreezeOptions:
    """The options of the command."""

    world_size: int | None = setting(None, POSITIVE)
    """Number of ranks for which the config is checked; null: no such check."""
    job: int | None = None
    """Number, from 0, of the job to write if the settings describe a sweep."""
    base: str | None = None
    """Job file to start from: the settings change its config, and its run directory is kept."""


def main(words: Sequence[str]) -> None:
    """Write the job file; exit with 2 for wrong input, with 1 for any other failure."""
    usage = "freeze FILE [option=value …] [key=value …]"
    with errors_as_exit_codes():
        options, rest = parse_options(FreezeOptions, words, usage=usage, description=__doc__)
        require(
            bool(rest) and "=" not in Path(rest[0]).name,
            "FILE is missing: freeze FILE [key=value …]",
        )
        require(
            options.job is None or options.base is None,
            f"job={options.job} chooses a job of a sweep, and base= has one job: leave one out",
        )
        path, *changes = rest
        if options.base is None:
            config, run_dir = compose_job(changes, options.job)
        else:
            config, run_dir = read_job(Path(options.base))
            config = from_builtins(change_keys(to_builtins(config), changes))
        if options.world_size is not None:
            config.check_world_size(options.world_size)
        write_job(Path(path), to_builtins(config), run_dir)
    print(run_dir)


def compose_job(overrides: Sequence[str], number: int | None) -> tuple[Config, Path]:
    """Return config and run directory of a job.

    number: the number of the job in a sweep, from 0; None: there is no sweep.

    Raises:
        ConfigError: there are several jobs and no `number`, or there is no job with this number.
    """
    jobs: list[tuple[Config, Path]] = []
    words = overrides if number is None else ["--multirun", *overrides]
    for_each_job(lambda config, run_dir: jobs.append((config, run_dir)), words)
    require(
        number is not None or len(jobs) == 1,
        f"a job file holds one job, not {len(jobs)}: choose one, job=NUMBER",
    )
    index = number or 0
    require(
        0 <= index < len(jobs),
        f"job={number} is not among the {len(jobs)} jobs of this sweep: count from 0",
    )
    return jobs[index]
