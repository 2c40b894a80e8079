"""Job files: the config of a job, checked before any rank starts, and its run directory."""

import json
from pathlib import Path
from typing import Any

from ddp_trainer.config.composition import from_builtins
from ddp_trainer.config.errors import ConfigError, path_error
from ddp_trainer.config.schema import Config
from ddp_trainer.files import replace_text


def write_job(path: Path, config: dict[str, Any], run_dir: Path) -> None:
    """Write a job file with a config, as `to_builtins` returns it, and a run directory.

    A `path_error` if it cannot be written.
    """
    text = json.dumps({"run_dir": str(run_dir), "config": config}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text + "\n")
    except OSError as error:
        cause = error.strerror or error
        raise path_error(error, f"job file {path} cannot be written: {cause}") from error


def read_job(path: Path) -> tuple[Config, Path]:
    """Return the config and the run directory of a job file.

    ConfigError if it is not a job file or its config breaks a rule; a `path_error` if it cannot be
    read.
    """
    try:
        job: dict[str, Any] = json.loads(path.read_text())
        return from_builtins(job["config"]), Path(job["run_dir"])
    except ConfigError:
        raise
    except OSError as error:
        fix = "give the path of a job file that every node can read"
        raise path_error(
            error, f"job_file={path} cannot be read ({error.strerror}): {fix}"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fix = f"write one with python -m ddp_trainer freeze {path}"
        raise ConfigError(f"job_file={path} is not a job file: {fix}") from error
