"""``train``, the default command: train in this process, which is one rank of the job."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from ddp_trainer import registry
from ddp_trainer.commands.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.commands.options import (
    list_fields,
    parse_options,
    program,
    wants_help,
    with_defaults,
)
from ddp_trainer.config.errors import config_class, require
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.launchers.job_file import read_job
from ddp_trainer.launchers.sweeps import register_launchers
from ddp_trainer.launchers.sweeps.results import RESULTS, Row, print_results, score_of
from ddp_trainer.runtime import disable_gc


@config_class
class TrainOptions:
    """The options of the command."""

    job_file: str | None = None
    """Job file, written by freeze, whose job is trained; it excludes all other arguments."""


def main(words: Sequence[str]) -> None:
    """Train one job or the jobs of a sweep; exit with 2 for wrong input, with 1 for a failure."""
    if wants_help(words):
        return print_keys()
    with errors_as_exit_codes():
        options, overrides = parse_options(TrainOptions, words)
        if options.job_file is not None:
            require(
                not overrides,
                f"{' '.join(overrides)} cannot change a job file: leave it out, or write a job file"
                " with it: python -m ddp_trainer freeze FILE key=value …",
            )
            train(*read_job(Path(options.job_file)), sweep=None)
            return
    register_launchers()
    try:
        with ExitStack() as stack:
            for_each_job(
                lambda config, run_dir: train(config, run_dir, sweep=stack if is_sweep() else None),
                overrides,
            )
    finally:  # also after a job that failed
        print_results()


def is_sweep() -> bool:
    """Return whether this process trains all jobs of a sweep, with ``hydra/launcher=basic``.

    Raises:
        ConfigError: another launcher is chosen. The launchers torchrun and slurm train in other
        processes, so that here --multirun is missing; any other launcher is not supported.
    """
    hydra = HydraConfig.get()
    launcher = hydra.runtime.choices["hydra/launcher"]
    is_multirun = hydra.mode is RunMode.MULTIRUN
    reason = "for sweeps: add --multirun, or leave it out"
    if is_multirun:
        reason = "not supported: choose basic, torchrun or slurm"
    require(launcher == "basic", f"hydra/launcher={launcher} is {reason}")
    return is_multirun


def train(config: Config, run_dir: Path, *, sweep: ExitStack | None) -> float:
    """Train one job and return its best score (`select_by`), which Hydra's sweeper compares.

    sweep: the exit stack that closes the process group after all jobs of the sweep; None: no sweep.
    A graceful stop ends the whole sweep.
    """
    environment = read_environment()
    config.check_world_size(environment.world_size)
    with disable_gc():  # after the checks, because torch takes seconds to import
        from ddp_trainer.distributed.process_group import process_group
        from ddp_trainer.training.summary import Status
        from ddp_trainer.training_run import run
    if sweep is not None:
        sweep.enter_context(process_group(environment, **config.process_group))
    summary = run(config, run_dir)
    if sweep is not None and environment.rank == 0:
        RESULTS[run_dir] = Row(
            overrides=HydraConfig.get().overrides.task,
            run_dir=run_dir,
            score=score_of(summary),
            select_by=config.select_by,
            is_higher_better=config.is_higher_better(config.select_by),
            seconds=summary.seconds,
        )
    if sweep is not None and summary.status is Status.stopped:
        sys.exit(0)  # raises SystemExit, because after an Exception Hydra runs the next job
    return score_of(summary)


def print_keys() -> None:
    """Print the keys of the config, and the keys of each choice, such as ``optimizer=sgd``."""
    print(f"usage: {program()} [train] [key=value …]\n       {program()} train job_file=FILE\n")
    print("FILE is a job file, which the command freeze writes.\n")
    print(f"keys, with their defaults:\n{list_fields(Config(), skip=registry.GROUPS)}")
    for name, group in registry.GROUPS.items():
        default = getattr(Config(), name)
        for choice in registry.choices(name).values():
            is_default = choice.name in (default if group.several else [default.name])
            print(f"\n{name}={choice.name}{' (default)' if is_default else ''}")
            prefix = f"{group.key(choice.name)}."
            if keys := list_fields(with_defaults(choice.schema), prefix=prefix, skip=["name"]):
                print(keys)
    print(
        "\nThe same command resumes an interrupted run. --cfg job shows the composed config,"
        " --multirun trains"
    )
    print(
        "key=a,b as two jobs, --hydra-help explains Hydra's flags. The groups are explained in"
        " README.md and docs/."
    )
