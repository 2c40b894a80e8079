"""From the words on a command line to composed configs, and from errors to exit codes."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.main import get_args_parser
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer.composition import resolve
from ddp_trainer.config import Config, ConfigError, config_dir, register_configs
from ddp_trainer.environment import Environment, read_environment
from ddp_trainer.explain import explain

USER_ERROR = 2
GRACE_SECONDS = 5.0
"""How long other nodes let rank 0 speak first: torchrun ends all ranks once one has exited."""


def for_each_job(do: Callable[[Config, Path], float | None]) -> None:
    """Compose what ``sys.argv`` says and call ``do(config, run_dir)``: once, or for each job of a sweep.

    Exits with 2 for the user's input and with 1 for anything else that `do` raises.
    """
    register_configs()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting 1

    @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
    def job(composed: DictConfig) -> float | None:
        with errors_as_exit_codes():  # here, as Hydra would announce an exception that passes through it
            config = resolve(composed)
            return do(config, job_dir(config))

    try:
        check_flags()
        job()
    except Exception as error:  # from composing: what happens in a job ends there
        refuse(error)


class errors_as_exit_codes:  # noqa: N801  # reads as what it does: with errors_as_exit_codes():
    """Exit with 2 for the user's input and with 1 for any other exception, each told once."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        match error:
            case ConfigError() | OmegaConfBaseException():
                refuse(error)
            case Exception():
                fail(error)


def check_flags() -> None:
    """Refuse flags that Hydra does not know; argparse itself would print its usage, and on every rank.

    Raises:
        ConfigError: says which.
    """

    def reject(message: str) -> NoReturn:
        what = message.removeprefix("unrecognized arguments: ")
        if what == message:
            raise ConfigError(message)
        if not what.startswith("-"):
            raise ConfigError(f"{what} stands apart from the other keys: put flags before or after all of them")
        raise ConfigError(
            f"{what.split()[0]} is no flag: set a key without dashes, key=value; --hydra-help lists the flags"
        )

    parser = get_args_parser()
    parser.error = reject  # type: ignore[method-assign]
    parser.parse_args()


def job_dir(config: Config) -> Path:
    """Return the run directory: a function of the config alone, the same on every rank and after a restart."""
    run_dir = Path(config.output_dir).expanduser() / config.name
    settings = HydraConfig.get()
    if settings.mode is RunMode.MULTIRUN:
        return run_dir / shortened(settings.job.override_dirname)
    return run_dir


def shortened(name: str) -> str:
    """Return `name`, cut and told apart by a hash if it is too long for a file system (255 bytes)."""
    if len(name.encode()) <= 200:
        return name
    return f"{name[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def refuse(error: Exception) -> NoReturn:
    """Print the user's error and exit 2: rank 0 speaks, or the first rank of a node that goes on without it."""
    try:
        environment = read_environment()
    except ConfigError:
        environment = Environment()  # it is what the error is about: every process speaks for itself
    if environment.rank != 0:
        time.sleep(GRACE_SECONDS * (1 if environment.local_rank == 0 else 2))
    if environment.local_rank == 0:
        print(f"error: {explain(error, sys.argv[1:])}", file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


def fail(error: Exception) -> NoReturn:
    """Exit 1 at once: interpreter shutdown aborts where other ranks are gone and DDP modules are not."""
    from ddp_trainer.watch import is_told, tell_unwatched

    if not is_told(error):
        tell_unwatched(error, read_environment())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
