"""Writes and reads job files (a checked config and its run directory); reads results of jobs."""

import json
import os
from pathlib import Path
from typing import Any

from ddp_trainer.config.composition import from_builtins
from ddp_trainer.config.errors import ConfigError, path_error, require
from ddp_trainer.config.schema import Config
from ddp_trainer.output import output_file
from ddp_trainer.training.summary import Summary


def write_job(path: Path, config: dict[str, Any], run_dir: Path) -> None:
    """Write the job file `path`. config: nested dicts, as `to_builtins` returns them.

    Raises:
        ConfigError, TransientError: the file cannot be written; `path_error` chooses the type.
    """
    text = json.dumps({"run_dir": str(run_dir), "config": config}, indent=1)
    with output_file(path, fix=": name another job file", begin=b'{\n "run_dir": ') as file:
        file.write(f"{text}\n".encode())


def read_job(path: Path) -> tuple[Config, Path]:
    """Return the config and the run directory of a job file.

    Raises:
        ConfigError: the file is not a job file, or its config breaks a rule.
        ConfigError, TransientError: the file cannot be read; `path_error` chooses the type.
    """
    require(
        os.path.isfile(path) or not os.path.exists(path),
        f"job_file={path} is a folder or a device: give the path of a file",
    )
    try:
        job: dict[str, Any] = json.loads(path.read_text())
        if b"\0" in os.fsencode(job["run_dir"]) or not Path(job["run_dir"]).name:
            raise ValueError("a path without a name, or with a NUL")
        return from_builtins(job["config"]), Path(job["run_dir"])
    except ConfigError:
        raise
    except OSError as error:
        fix = "give the path of a job file that every node can read"
        raise path_error(
            error, f"job_file={path} cannot be read ({error.strerror}): {fix}"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        fix = f"write one with python -m ddp_trainer freeze {path}"
        raise ConfigError(f"job_file={path} is not a job file: {fix}") from error


def summary_since(began: float, run_dir: Path) -> Summary:
    """Return the summary in `run_dir`, if it was written after `began`, in unix seconds.

    Raises:
        OSError, ValueError: there is none, or it is damaged or older.
    """
    path = run_dir / "summary.json"
    if path.stat().st_mtime < began:
        raise ValueError("it is that of an earlier launch")
    return Summary.from_json(path.read_text())
