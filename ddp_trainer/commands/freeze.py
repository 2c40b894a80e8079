"""``freeze``: compose and check a config, and write it to a job file.

Launch scripts and sweeps train from job files, so that a mistake is reported once, before any rank
starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.commands.options import parse_options
from ddp_trainer.config.composition import from_builtins, to_builtins
from ddp_trainer.config.errors import POSITIVE, require, setting
from ddp_trainer.config.keys import change_keys
from ddp_trainer.config.schema import Config
from ddp_trainer.launchers.job_file import read_job, write_job


@dataclass(kw_only=True, slots=True)
class FreezeOptions:
    """The options of the command."""

    world_size: int | None = setting(None, POSITIVE)
    """Check the config for this number of ranks."""
    job: int | None = None
    """Number of the job to write if the settings are a sweep, from 0."""
    base: str | None = None
    """Job file whose config is changed by the settings; the run directory stays the same."""


def main(words: Sequence[str]) -> None:
    """Write the job file and print its run directory; exit with 2 for wrong input, else with 1."""
    usage = "freeze FILE [option=value …] [key=value …]"
    with errors_as_exit_codes():
        options, rest = parse_options(FreezeOptions, words, usage=usage, description=__doc__)
        require(
            bool(rest) and "=" not in Path(rest[0]).name,
            "FILE is missing: freeze FILE [key=value …]",
        )
        path = Path(rest[0])
        changes = rest[1:]
        if options.base is None:
            config, run_dir = compose_job(changes, options.job)
        else:
            config, run_dir = read_job(Path(options.base))
            config = from_builtins(change_keys(to_builtins(config), changes))
        if options.world_size is not None:
            config.check_world_size(options.world_size)
        write_job(path, to_builtins(config), run_dir)
    print(run_dir)


def compose_job(overrides: Sequence[str], number: int | None) -> tuple[Config, Path]:
    """Return config and run directory of the job; of a sweep, those of job `number`."""
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
