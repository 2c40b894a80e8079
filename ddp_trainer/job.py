"""A job file: one config, composed once and frozen, for all ranks of all nodes and for every restart.

``python -m ddp_trainer.job freeze FILE [key=value …]`` writes one, ``torchrun … -m ddp_trainer.job run FILE``
trains what it says. Launch scripts and sweeps go this way: a bad config is one error before anything starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from ddp_trainer.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.composition import from_builtins, to_builtins
from ddp_trainer.config import Config, ConfigError, require
from ddp_trainer.environment import read_environment
from ddp_trainer.files import replace_text
from ddp_trainer.memory import without_collection


def write_job(path: Path, config: Config, run_dir: Path) -> None:
    """Write the job file that `read_job` reads."""
    replace_text(path, json.dumps({"run_dir": str(run_dir), "config": to_builtins(config)}, indent=1) + "\n")


def read_job(path: Path) -> tuple[Config, Path]:
    """Return the config and run directory that `write_job` has put into `path`.

    Raises:
        ConfigError: there is no job file at `path`, or its config breaks a rule.
    """
    try:
        said: dict[str, Any] = json.loads(path.read_text())
        return from_builtins(said["config"]), Path(said["run_dir"])
    except OSError as error:
        raise ConfigError(f"job file {path} cannot be read ({error.strerror}): is it on a shared disk?") from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no job file: write one with python -m ddp_trainer.job freeze {path}") from error


def main() -> None:
    """Freeze a job or run one; exit with 0, 2 for the user's input, or 1."""
    arguments, rest = parse(sys.argv[1:])
    if arguments.do == "run":
        with errors_as_exit_codes():
            require(not rest, f"{' '.join(rest)}: a job file is run as it is, to change it freeze another")
            train(arguments.file)
    else:
        freeze(arguments, rest)


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into what is meant for this module and the rest, which is Hydra's."""
    parser = argparse.ArgumentParser(prog="python -m ddp_trainer.job", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="do", required=True)
    freezing = commands.add_parser("freeze", allow_abbrev=False, help="compose and check a config, write a job file")
    freezing.add_argument("file", type=Path)
    freezing.add_argument("--job", type=int, metavar="I", help="the config is a sweep: take its job number I, from 0")
    freezing.add_argument("--from", type=Path, dest="frozen", metavar="OTHER", help="change what that job file says")
    freezing.add_argument("--world-size", type=int, metavar="N", help="check the config for so many ranks")
    running = commands.add_parser("run", allow_abbrev=False, help="train what a job file says; for torchrun")
    running.add_argument("file", type=Path)
    return parser.parse_known_args(words)


def train(path: Path) -> None:
    """Train what the job file at `path` says, as one rank."""
    config, run_dir = read_job(path)
    config.check_world_size(read_environment().world_size)
    with without_collection():
        from ddp_trainer.run import run  # torch takes seconds to import; a bad config should not

    run(config, run_dir)


def freeze(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Write the job file and print its run directory."""
    with errors_as_exit_codes():
        config, run_dir = (
            refrozen(arguments.frozen, overrides) if arguments.frozen else composed(arguments.job, overrides)
        )
        if arguments.world_size is not None:
            config.check_world_size(arguments.world_size)
        try:
            arguments.file.parent.mkdir(parents=True, exist_ok=True)
            write_job(arguments.file, config, run_dir)
        except OSError as error:
            raise ConfigError(f"job file {arguments.file} cannot be written: {error.strerror}") from error
    print(run_dir)


def composed(number: int | None, overrides: list[str]) -> tuple[Config, Path]:
    """Return the config and run directory that `overrides` make: of job `number` if they are a sweep.

    Raises:
        ConfigError: the sweep has no such job.
    """
    jobs: list[tuple[Config, Path]] = []

    def collect(config: Config, run_dir: Path) -> float:
        jobs.append((config, run_dir))
        return 0.0

    sys.argv[1:] = overrides if number is None else ["--multirun", *overrides]
    for_each_job(collect)
    number = number or 0
    require(0 <= number < len(jobs), f"--job={number} is not among the {len(jobs)} jobs of this sweep, from 0")
    return jobs[number]


def refrozen(path: Path, changes: list[str]) -> tuple[Config, Path]:
    """Return what the job file at `path` says, with `changes` (key=value): its run directory stays.

    Raises:
        ConfigError: it is no job file, or a rule is broken.
        OmegaConfBaseException: a key is unknown, or a value is of another type.
    """
    config, run_dir = read_job(path)
    tree = OmegaConf.merge(to_builtins(config), OmegaConf.from_dotlist(changes))
    return from_builtins(cast(dict[str, Any], OmegaConf.to_container(tree))), run_dir


if __name__ == "__main__":
    main()
