"""``launch(config, num_ranks=2)``: train on several processes of this machine, from Python."""

import logging
import os
import shlex
import sys
import time
import uuid
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
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
from ddp_trainer.launchers.agent import QUIET, BoundRendezvous, root_cause
from ddp_trainer.observers.failures.report import report_failure, write_error_file
from ddp_trainer.training.summary import Summary
from ddp_trainer.training_run import run

SHUTDOWN_SECONDS = 300
"""How long the ranks may take to save and end after Ctrl-C, where torch has this setting."""


class LaunchError(RuntimeError):
    """A rank failed; the message is the root cause."""


def launch(config: Config, num_ranks: int = 2, *, run_dir: Path | None = None) -> Summary:
    """Train on `num_ranks` processes of this machine, and return the result.

    A script must call this below ``if __name__ == "__main__"``, because each rank imports it: a
    model, loss or data set that the script registers is known to all ranks. Ctrl-C and SIGTERM stop
    the training gracefully: it is saved, and the summary's status is stopped. The ranks communicate
    over the loopback interface only.

    Raises:
        ConfigError: the config is not valid here. TransientError: a condition that may go away.
        LaunchError: a rank failed.
    """
    config.check_world_size(num_ranks)
    check_importable(config)
    limit_spinning()
    for name in QUIET:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("bound", BoundRendezvous)
    run_dir = run_dir or Path(config.output_dir).expanduser() / config.name
    try:
        results = elastic_launch(launch_config(config, num_ranks), train_rank)(
            to_builtins(config), str(run_dir), command_of_main()
        )
    except SignalException:
        return Summary.from_json((run_dir / "summary.json").read_text())
    except ChildFailedError as error:
        raise error_of(error) from None
    return Summary.from_json(results[0])


def launch_config(config: Config, num_ranks: int) -> LaunchConfig:
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
        rdzv_configs={"rank": 0, "timeout": config.timeout_seconds},
        max_restarts=0,
        start_method="spawn",
        signals_to_handle="SIGTERM,SIGINT",
        **options,
    )


def check_importable(config: Config) -> None:
    """Check that other processes can import all choices of `config`; ConfigError if not."""
    is_script = hasattr(sys.modules["__main__"], "__file__")
    for group in registry.GROUPS.values():
        for key, section in group.sections(getattr(config, group.name)).items():
            require(
                is_script or type(section).__module__ != "__main__",
                f"{key}={section.name} is registered in a notebook, which the ranks cannot import: "
                "move its code to a .py file, and import this file",
            )


def command_of_main() -> str:
    """Return the command that repeats this program, for reports of failures."""
    if not hasattr(sys.modules["__main__"], "__file__"):
        return "run the same cell"
    return shlex.join(["python", *sys.argv])


def train_rank(tree: dict[str, Any], run_dir: str, command: str) -> str:
    """Train as one of the ranks, and return the text of summary.json; the ranks' entry point."""
    end_with_launcher()
    os.setsid()  # else Ctrl-C in a terminal would reach each rank twice
    os.environ["DDP_TRAINER_COMMAND"] = command
    try:
        registry.load_plugins(plugin_modules())
        return run(from_builtins(tree), Path(run_dir)).to_json()
    except (ConfigError, TransientError, registry.PluginError) as error:
        error_file = read_environment().error_file
        assert error_file is not None, "set by torchrun"
        write_error_file(error_file, str(error), since=time.time())
        sys.exit(FAILURE if isinstance(error, TransientError) else USER_ERROR)
    except Exception as error:
        report_failure(error, read_environment())
        # Because the interpreter may abort at its end if other ranks have ended before.
        os._exit(FAILURE)


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
