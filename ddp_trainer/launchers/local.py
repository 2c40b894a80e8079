"""``launch(config, num_ranks=2)``: train on several processes of this machine, from Python."""

import logging
import os
import shlex
import sys
import threading
import uuid
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ddp_trainer import registry
from ddp_trainer.config.composition import from_builtins, to_builtins
from ddp_trainer.config.errors import FAILURE, USER_ERROR, ConfigError, TransientError, require
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import (
    end_with_launcher,
    limit_spinning,
    plugin_modules,
    read_environment,
)
from ddp_trainer.launchers.agent import prepare_torchrun, root_cause
from ddp_trainer.observers.failures.report import report, report_failure
from ddp_trainer.training.summary import Status, Summary
from ddp_trainer.training_run import run

SHUTDOWN_SECONDS = 300
"""How long the ranks may take to save and end after Ctrl-C, where torch has this setting."""
READ_SECONDS = 3.0
"""How long the launching process may take to read the result of a rank that was stopped."""


class LaunchError(RuntimeError):
    """A rank failed; the message is the root cause."""


def launch(config: Config, num_ranks: int = 2, *, run_dir: Path | None = None) -> Summary:
    """Train on `num_ranks` processes of this machine, and return the result.

    A script must call this below ``if __name__ == "__main__"``, because each rank imports it: a
    model, loss or data set that the script registers is known to all ranks. Ctrl-C and SIGTERM stop
    the training gracefully: it is saved, and the summary's status is stopped. The ranks communicate
    over the loopback interface only.

    Raises:
        ConfigError: the config is not valid here.
        LaunchError: a rank failed, or could not start because of a condition that may go away.
    """
    config.check_world_size(num_ranks)
    modules = modules_of(config.sections)
    limit_spinning()
    prepare_torchrun()
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    run_dir = run_dir or Path(config.output_dir).expanduser() / config.name
    try:
        results = elastic_launch(launch_config(num_ranks, config.timeout_seconds), train_rank)(
            to_builtins(config), str(run_dir), command_of_main(), modules
        )
    except SignalException:
        return Summary.from_json((run_dir / "summary.json").read_text())
    except ChildFailedError as error:
        raise error_of(error) from None
    return Summary.from_json(results[0])


def launch_config(num_ranks: int, timeout_seconds: float) -> LaunchConfig:
    """Return torchrun's settings for ranks of one node."""
    options: dict[str, Any] = {}
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # since torch 2.12
        options["shutdown_timeout"] = SHUTDOWN_SECONDS
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="bound",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"rank": 0, "timeout": timeout_seconds},
        max_restarts=0,
        start_method="spawn",
        signals_to_handle="SIGTERM,SIGINT",
        **options,
    )


def modules_of(sections: Mapping[str, Any]) -> list[str]:
    """Return the modules that register the chosen `sections`; ConfigError if it is a notebook.

    The ranks import a script by themselves, but not the modules that a notebook imports.
    """
    is_script = hasattr(sys.modules["__main__"], "__file__")
    modules = set()
    for key, section in sections.items():
        modules.add(type(section).__module__)
        require(
            is_script or "__main__" not in modules,
            f"{key}={section.name} is registered in a notebook, which the ranks cannot import: "
            "move its code to a .py file, and import this file",
        )
    return sorted(modules - {"__main__"})


def command_of_main() -> str:
    """Return the command that repeats this program, for reports of failures."""
    if not hasattr(sys.modules["__main__"], "__file__"):
        return "run the same cell"
    return shlex.join(["python", *sys.argv])


def train_rank(tree: dict[str, Any], run_dir: str, command: str, modules: list[str]) -> str:
    """Train as one of the ranks, and return the text of summary.json; the ranks' entry point.

    modules: the names of modules to import, because they register choices of the config.
    """
    end_with_launcher()
    os.setsid()  # else Ctrl-C in a terminal would reach each rank twice
    os.environ["DDP_TRAINER_COMMAND"] = command
    environment = read_environment()
    try:
        registry.load_plugins(plugin_modules())
        for module in modules:
            import_module(module)
        summary = run(from_builtins(tree), Path(run_dir))
    except (ConfigError, TransientError, registry.PluginError) as error:
        report(str(error), environment)
        sys.exit(FAILURE if isinstance(error, TransientError) else USER_ERROR)
    except Exception as error:
        report_failure(error, environment)
        # Because the interpreter may abort at its end if other ranks have ended before.
        os._exit(FAILURE)
    if summary.status is Status.stopped:
        # A launching process that got the signal itself waits for the rank to end, and the rank
        # for that process to read the result: end also if it is not read.
        leave = threading.Timer(READ_SECONDS, os._exit, [0])
        leave.daemon = True
        leave.start()
    return summary.to_json()


def error_of(failure: ChildFailedError) -> Exception:
    """Return the error to raise for the rank that failed first."""
    rank, first = failure.get_first_failure()
    message: Any = first.message
    if not isinstance(message, dict):
        return LaunchError(root_cause(rank, first))
    text = message["extraInfo"]["py_callstack"]
    if first.exitcode == USER_ERROR:
        return ConfigError(text)
    return LaunchError(text)
