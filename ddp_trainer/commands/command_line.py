"""Compose configs from command-line arguments ("words"), and turn errors into exit codes."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.errors import HydraException
from hydra.main import get_args_parser
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer import registry
from ddp_trainer.commands.options import parse_options
from ddp_trainer.config.composition import config_dir, job_dir, register_configs, to_config
from ddp_trainer.config.errors import (
    FAILURE,
    USER_ERROR,
    ConfigError,
    JobError,
    TransientError,
    path_error,
)
from ddp_trainer.config.messages import check_overrides, format_config_error, quote_texts
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import Environment, exit_rank, read_environment
from ddp_trainer.observers.failures.report import report_failure
from ddp_trainer.registry import PluginError

T = TypeVar("T")

RANK_0_SECONDS = 5.0
"""Seconds that the other nodes wait before they print an error, so that rank 0 prints it first.

This is needed because torchrun ends all ranks when one rank has exited.
"""


class CommandOutput(FileIO):
    """The stdout of a command: the command ends if it cannot be written, and without a traceback.

    Not by the signal SIGPIPE, which a connection to another process could raise too.
    """

    def write(self, data: Any) -> int:
        """Write `data`; exit with 141, as after SIGPIPE, if the reader has ended, as `head` does.

        After any other failure, print it and exit with 1.
        """
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what is still buffered
            if isinstance(error, BrokenPipeError):
                sys.exit(128 + signal.SIGPIPE)
            reason = f"the output cannot be written ({error.strerror})"
            exit_with_user_error(TransientError(reason))


@contextmanager
def command_output() -> Iterator[None]:
    """Make `CommandOutput` the stdout in the ``with`` block, and write all of it at the end."""
    old = sys.stdout
    if not isinstance(old, TextIOWrapper):  # it is closed, for example
        yield
        return
    file = BufferedWriter(CommandOutput(old.fileno(), "w", closefd=False))
    line_by_line = old.line_buffering or old.write_through
    new = TextIOWrapper(file, old.encoding, old.errors, line_buffering=line_by_line)
    with redirect_stdout(new):
        try:
            yield
        finally:
            new.flush()


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
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints errors and exits with 1

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(composed: DictConfig) -> float | None:
        # inside of the job, because Hydra prints an exception that leaves the job
        with errors_as_exit_codes():
            config = to_config(composed)
            return function(config, job_dir(config.output_dir, config.name))

    try:
        sys.argv[1:] = quote_texts(words)
        register_configs()
        check_arguments()
        job()
    except JobError:  # reported by the launcher that ran the job
        sys.exit(FAILURE)
    except Exception as error:  # because Hydra raises many types while it composes a config
        if isinstance(error, OSError) and error.errno is not None:
            place = error.filename or "a file of the sweep"
            error = path_error(error, f"{place} cannot be used ({error.strerror})")
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
    except OSError as error:
        if error.filename is not None or error.errno != errno.ENOSPC:
            report_failure(error, read_environment())
            exit_rank(FAILURE)
        reason = f"the output cannot be written ({error.strerror})"
        exit_with_user_error(TransientError(reason))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "torchvision"):
            reason = f"{error.name} is not installed: pip install torch torchvision"
            exit_with_user_error(TransientError(reason))
        report_failure(error, read_environment())
        exit_rank(FAILURE)


def check_arguments() -> None:
    """Raise ConfigError for a bad argument; argparse alone would print its usage on every rank."""

    for word in sys.argv[1:]:
        name = word.lstrip("-").partition("=")[0]
        if word.startswith("--") and (name in registry.GROUPS or name == "experiment"):
            raise ConfigError(f"{word}: keys have no dashes, {name}=CHOICE")

    def reject(message: str) -> NoReturn:
        raise ConfigError(
            f"{message}: set keys without dashes, key=value, and put all flags before or after the"
            " keys; --hydra-help lists the flags"
        )

    parser = get_args_parser()
    parser.error = reject  # type: ignore[method-assign]
    arguments = parser.parse_args()
    check_overrides(arguments.overrides, multirun=arguments.multirun)


def exit_with_user_error(error: Exception) -> NoReturn:
    """Print the error once per node, rank 0 first; exit with 1 for TransientError, else with 2."""
    try:
        environment = read_environment()
    except ConfigError:  # the environment is wrong: the rank is unknown, and each process prints
        environment = Environment()
    if environment.rank != 0:
        time.sleep(RANK_0_SECONDS * (1 if environment.local_rank == 0 else 2))
    if environment.local_rank == 0:
        print(f"error: {format_config_error(error, sys.argv[1:])}", file=sys.stderr, flush=True)
    leave = exit_rank if environment.under_torchrun else sys.exit
    leave(FAILURE if isinstance(error, TransientError) else USER_ERROR)
