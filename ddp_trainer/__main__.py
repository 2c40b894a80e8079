"""The command line: ``torchrun --nproc_per_node=N -m ddp_trainer [key=value …]``."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ddp_trainer.config import Config, ConfigError, config_dir, register_configs, resolve
from ddp_trainer.environment import read_environment

USER_ERROR = 2
GRACE_SECONDS = 5.0
"""How long other ranks let rank 0 speak first: torchrun ends all ranks once one has exited."""


def main() -> None:
    """Compose the config, run the job or jobs, and exit with 0, 2 for the user's input, or 1."""
    register_configs()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing and exiting 1
    with ExitStack() as stack:

        @hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="config")
        def job(composed: DictConfig) -> float | None:
            try:  # here, as Hydra would announce an exception that passes through it
                return train(resolve(composed), stack)
            except (ConfigError, OmegaConfBaseException) as error:
                refuse(error)
            except Exception as error:
                fail(error)

        try:
            job()
        except (HydraException, OmegaConfBaseException) as error:
            refuse(error)


def train(config: Config, stack: ExitStack) -> float:
    """Run one job and return its best top-1 for a sweeper. The process group lives until `stack` is closed."""
    from ddp_trainer.distributed import connected  # torch takes seconds to import; a bad config should not
    from ddp_trainer.run import run

    stack.enter_context(connected(config, read_environment()))
    return run(config, job_dir(config)).best_top1


def fail(error: Exception) -> NoReturn:
    """Exit 1 at once: interpreter shutdown aborts where other ranks are gone and DDP modules are not."""
    from ddp_trainer.watch import is_told, tell_unwatched

    if not is_told(error):
        tell_unwatched(error, read_environment())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def job_dir(config: Config) -> Path:
    """Return the run directory: a function of the config alone, the same on every rank and after a restart."""
    run_dir = Path(config.output_dir) / config.name
    settings = HydraConfig.get()
    if settings.mode is RunMode.MULTIRUN:
        return run_dir / settings.job.override_dirname
    return run_dir


def refuse(error: Exception) -> NoReturn:
    """Print the user's error once, by rank 0, and exit 2."""
    if read_environment().rank != 0:
        time.sleep(GRACE_SECONDS)
        sys.exit(USER_ERROR)
    print(f"error: {explain(error)}", file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


def explain(error: Exception) -> str:
    """Return what went wrong in one paragraph, with the cause that Hydra wrapped."""
    parts: list[str] = []
    cause: Any = error
    while cause is not None:
        text = " ".join(str(cause).split())
        if text and not any(text in part for part in parts):
            parts.append(text)
        cause = cause.__cause__
    return " · ".join(parts)


if __name__ == "__main__":
    main()
