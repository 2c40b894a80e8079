"""``train``, the default command: train in this process, which is one rank of the job."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from ddp_trainer import registry
from ddp_trainer.commands.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.commands.options import list_fields, parse_options, program, wants_help
from ddp_trainer.config.errors import require
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.launchers.job_file import read_job
from ddp_trainer.launchers.sweeps import register_launchers
from ddp_trainer.runtime import disable_gc


@dataclass(kw_only=True, slots=True)
class TrainOptions:
    """The options of the command."""

    job_file: str | None = None
    """Train the job of this file, written by freeze; no other arguments are possible then."""


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
    with ExitStack() as stack:
        for_each_job(
            lambda config, run_dir: train(config, run_dir, sweep=stack if is_sweep() else None),
            overrides,
        )


def is_sweep() -> bool:
    """Return whether this process trains the jobs of a sweep itself, with ``hydra/launcher=basic``.

    ConfigError with another launcher: torchrun and slurm train the jobs of a sweep in other
    processes, so that one of them here means that --multirun is missing; any other launcher is not
    supported.
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
    """Train one job and return its best top-1, which Hydra's sweeper compares.

    sweep: the exit stack of a sweep, which owns the process group of all its jobs; a graceful stop
    ends the whole sweep. None: no sweep.
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
    if sweep is not None and summary.status is Status.stopped:
        sys.exit(0)  # SystemExit, because after an Exception Hydra runs the next job
    return summary.best_top1


def print_keys() -> None:
    """Print the keys of the config, and the keys of each choice, such as ``optimizer=sgd``."""
    print(f"usage: {program()} [train] [key=value …]\n       {program()} train job_file=FILE\n")
    print(f"keys, with their defaults:\n{list_fields(Config(), skip=registry.GROUPS)}")
    for name, group in registry.GROUPS.items():
        for choice in registry.choices(name).values():
            print(f"\n{name}={choice.name}")
            prefix = f"{group.key(choice.name)}."
            if keys := list_fields(choice.schema(), prefix=prefix, skip=["name"]):
                print(keys)
    print(
        "\nThe same command resumes an interrupted run. --cfg job shows the composed config,"
        " --multirun trains"
    )
    print(
        "key=a,b as two jobs, --hydra-help explains Hydra's flags. The groups are explained in"
        " README.md and docs/."
    )
