"""Compose configs from the words of a command line, and turn errors into exit codes."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import hydra
from hydra.errors import HydraException
from hydra.main import get_args_parser
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer.commands.options import parse_options
from ddp_trainer.config.composition import config_dir, job_dir, register_configs, to_config
from ddp_trainer.config.errors import (
    FAILURE,
    USER_ERROR,
    ConfigError,
    JobError,
    TransientError,
    require,
)
from ddp_trainer.config.messages import check_overrides, format_config_error
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import Environment, read_environment
from ddp_trainer.observers.failures.report import report_failure
from ddp_trainer.registry import PluginError

T = TypeVar("T")

RANK_0_SECONDS = 5.0
"""Seconds in which rank 0 prints an error first: torchrun ends all ranks when one has exited."""


def run_command(
    command: Callable[[Config, Path, T], None],
    schema: type[T],
    words: Sequence[str],
    *,
    description: str | None,
) -> None:
    """Call ``command(config, run_dir, options)`` for each job of `words`, or print the help."""
    usage = f"{command.__name__} [option=value …] [key=value …]"
    with errors_as_exit_codes():
        options, overrides = parse_options(schema, words, usage=usage, description=description)
    for_each_job(lambda config, run_dir: command(config, run_dir, options), overrides)


def for_each_job(function: Callable[[Config, Path], float | None], words: Sequence[str]) -> None:
    """Call ``function(config, run_dir)`` for the job of `words`, or for each job of a sweep."""
    sys.argv[1:] = words
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting 1

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(composed: DictConfig) -> float | None:
        # inside the job, because Hydra prints exceptions that leave it
        with errors_as_exit_codes():
            config = to_config(composed)
            return function(config, job_dir(config.output_dir, config.name))

    try:
        register_configs()
        check_arguments()
        job()
    except JobError:  # reported by the launcher that ran the job
        sys.exit(FAILURE)
    except Exception as error:  # Hydra raises many kinds while it composes
        exit_with_user_error(error)


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Print an exception of the ``with`` block; exit with 2 if the input is wrong, else with 1."""
    try:
        yield
    except (
        TransientError,
        ConfigError,
        OmegaConfBaseException,
        HydraException,
        PluginError,
    ) as error:
        exit_with_user_error(error)
    except Exception as error:
        report_failure(error, read_environment())
        sys.stdout.flush()
        sys.stderr.flush()
        # because interpreter shutdown aborts if DDP modules exist and other ranks have ended
        os._exit(FAILURE)


def check_arguments() -> None:
    """Raise ConfigError for a bad word in ``sys.argv``; argparse prints its usage on every rank."""

    def reject(message: str) -> NoReturn:
        raise ConfigError(message)

    parser = get_args_parser()
    parser.error = reject  # type: ignore[method-assign]
    arguments, unknown = parser.parse_known_args()
    for word in unknown:
        hint = "set a key without dashes, key=value; --hydra-help lists the flags"
        require(not word.startswith("-"), f"{word} is not a flag: {hint}")
        reject(
            f"{word} is separated from the other keys by a flag: put all flags before or after the"
            " keys"
        )
    check_overrides(arguments.overrides, multirun=arguments.multirun)


def exit_with_user_error(error: Exception) -> NoReturn:
    """Print the error once per node and exit, rank 0 first."""
    try:
        environment = read_environment()
    except ConfigError:  # of the environment itself: every process prints it
        environment = Environment()
    if environment.rank != 0:
        time.sleep(RANK_0_SECONDS * (1 if environment.local_rank == 0 else 2))
    if environment.local_rank == 0:
        print(f"error: {format_config_error(error, sys.argv[1:])}", file=sys.stderr, flush=True)
    sys.exit(FAILURE if isinstance(error, TransientError) else USER_ERROR)
