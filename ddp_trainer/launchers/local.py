"""``launch(config, num_ranks=2)``: train on several processes of this machine, from Python."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ddp_trainer import registry
from ddp_trainer.config.composition import from_builtins, to_builtins
from ddp_trainer.config.errors import FAILURE, USER_ERROR, ConfigError, TransientError, require
from ddp_trainer.config.plugins import load_plugins
from ddp_trainer.cores import usable_cores
from ddp_trainer.distributed.environment import (
    Environment,
    end_with_launcher,
    exit_rank,
    limit_spinning,
    plugin_modules,
    read_environment,
)
from ddp_trainer.launchers.agent import error_text, prepare_torchrun, root_cause
from ddp_trainer.launchers.job_file import summary_since
from ddp_trainer.observers.failures.report import own_command, report, report_failure
from ddp_trainer.public_config import Config, checked_copy
from ddp_trainer.training.summary import Status, Summary
from ddp_trainer.training_run import run

SHUTDOWN_SECONDS = 300
"""Time limit for the ranks to save and end after Ctrl-C; before torch 2.12 there is no setting."""
READ_SECONDS = 3.0
"""How long a stopped rank waits for the launching process to read its result."""
IMPORTS_LAUNCH = 76
"""The exit code of a rank that would launch again, because it imports a script without a guard."""


class LaunchError(RuntimeError):
    """A rank failed; the message is the root cause."""


def launch(config: Config, num_ranks: int = 2, *, run_dir: Path | str | None = None) -> Summary:
    """Train on `num_ranks` processes of this machine, and return the summary.

    A script must call this below ``if __name__ == "__main__"``, because each rank imports the
    script, and so knows the models, losses and data sets that the script registers. Ctrl-C and
    SIGTERM stop the training gracefully: a checkpoint is saved, and the summary's status is
    stopped. The ranks communicate over the loopback interface only. `run_dir` is
    ``<output_dir>/<name>`` unless given.

    Raises:
        ConfigError: the config is not valid for this machine, data set or number of ranks.
        LaunchError: a rank failed, or could not start because of a condition that may go away.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as Process.start tests
        os._exit(IMPORTS_LAUNCH)
    require(
        type(num_ranks) is int and num_ranks >= 1,
        f"num_ranks={num_ranks!r} must be a whole number, at least 1",
    )
    if num_ranks > 2 * usable_cores() and not torch.cuda.is_available():
        warnings.warn(f"num_ranks={num_ranks} on {usable_cores()} cores is slow", stacklevel=2)
    chosen = checked_copy(config)
    chosen.check_world_size(num_ranks)
    modules = modules_for_ranks(chosen.sections)
    limit_spinning()
    prepare_torchrun()
    run_dir = Path(run_dir or Path(chosen.output_dir).expanduser() / chosen.name)
    began = time.time()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        results = elastic_launch(launch_config(num_ranks, chosen.timeout_seconds), train_rank)(
            to_builtins(chosen), str(run_dir), own_command(Environment()), modules
        )
    except SignalException:
        try:
            return summary_since(began, run_dir)
        except (OSError, ValueError) as error:
            reason = "stopped before the training had begun: call launch again to start it"
            raise LaunchError(reason) from error
    except ChildFailedError as error:
        raise error_of(error) from None
    finally:  # torchrun's agent has replaced them, if this is the main thread
        with suppress(ValueError, TypeError):
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Summary.from_json(results[0])


def modules_for_ranks(sections: dict[str, Any]) -> list[str]:
    """Return the modules, besides the script, that ranks import for the choices in `sections`.

    ConfigError if ranks cannot import the script, or a choice is registered in a notebook's cell.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    require(
        script is None or os.path.isfile(script),
        f"ranks cannot import {script}: write the script to a file",
    )
    modules = {type(part).__module__: f"{key}={part.name}" for key, part in sections.items()}
    here = modules.pop("__main__", None)
    require(
        script is not None or here is None,
        f"{here} is registered in a cell, which ranks cannot import: write it to a .py file"
        " (%%writefile FILE.py), and import that file here",
    )
    return sorted(modules)


def launch_config(num_ranks: int, timeout_seconds: float) -> LaunchConfig:
    """Return torchrun's settings for `num_ranks` ranks on this node."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="bound",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"rank": 0, "timeout": timeout_seconds},
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT",
    )
    if hasattr(config, "shutdown_timeout"):  # since torch 2.12
        config.shutdown_timeout = SHUTDOWN_SECONDS
    return config


def train_rank(tree: dict[str, Any], run_dir: str, command: str, modules: list[str]) -> str:
    """Train as one rank, and return the text of summary.json; the entry point of each rank.

    tree: the config, as `to_builtins` returns it. command: the command that continues the run, for
    reports of failures. modules: names of modules to import, which register choices of the config.
    """
    end_with_launcher()
    os.setsid()  # else Ctrl-C in a terminal would reach each rank twice
    os.environ["DDP_TRAINER_COMMAND"] = command
    environment = read_environment()
    try:
        load_plugins(plugin_modules())
        for module in modules:
            import_module(module)
        summary = run(from_builtins(tree), Path(run_dir))
    except (ConfigError, TransientError, registry.PluginError) as error:
        report(str(error), environment)
        exit_rank(FAILURE if isinstance(error, TransientError) else USER_ERROR)
    except Exception as error:
        report_failure(error, environment)
        exit_rank(FAILURE)
    if summary.status is Status.stopped:
        # If the launching process got the signal too, it waits for the ranks and reads no result. A
        # rank ends only when its result is read, so the timer ends it.
        leave = threading.Timer(READ_SECONDS, os._exit, [0])
        leave.daemon = True
        leave.start()
    return summary.to_json()


def error_of(failure: ChildFailedError) -> Exception:
    """Return the error to raise: a ConfigError or LaunchError with the first rank's error text."""
    rank, first = failure.get_first_failure()
    if first.exitcode == IMPORTS_LAUNCH:
        return ConfigError(
            f"{sys.argv[0]} calls launch again in each rank, because each rank imports the script:"
            ' move the call below if __name__ == "__main__":'
        )
    text = error_text(first)
    if text and first.exitcode == USER_ERROR:
        return ConfigError(text)
    return LaunchError(text or root_cause(rank, first).removeprefix("error: "))
