"""The report of a failure: its text, and the error file through which torchrun prints it."""

import json
import re
import shlex
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from ddp_trainer.distributed.environment import Environment

REPORTED = "reported by FailureMonitor"
"""The note on an error that has been reported already."""
RESUME_NEVER = re.compile(r""" +(['"]?)\+{0,2}resume=never\1(?= |$)""")


def report_failure(error: Exception, environment: Environment) -> None:
    """Report `error` with its traceback, unless a `FailureMonitor` has reported it or its root
    cause.
    """
    if REPORTED not in getattr(error, "__notes__", ()):
        report("".join(traceback.format_exception(error)), environment, since=time.time())


def report(text: str, environment: Environment, *, since: float) -> None:
    """Write `text` to torchrun's error file, or else to stderr. since: when the failure began, in
    unix seconds.
    """
    with suppress(OSError):
        if environment.error_file is not None:
            return write_error_file(environment.error_file, text, since=since)
    with suppress(OSError):  # stderr may be closed
        print(text, file=sys.stderr, flush=True)


def write_error_file(path: str, text: str, *, since: float) -> None:
    """Write `text` to `path`, in the format of torchrun's error files.

    since: when the failure began, in unix seconds; of the files of several ranks, torchrun prints
    the earliest.
    """
    details = {"py_callstack": text, "timestamp": str(int(since))}
    temporary = Path(f"{path}.writing")
    temporary.write_text(
        json.dumps({"message": {"message": text.splitlines()[0], "extraInfo": details}})
    )
    temporary.replace(path)


def command_to_continue(environment: Environment) -> str:
    """Return the command line that resumes this run: the one that started it, without
    resume=never.
    """
    num_nodes = environment.world_size // environment.local_world_size
    ranks = environment.local_world_size
    nodes = f" --nnodes={num_nodes} …" if num_nodes > 1 else ""
    torchrun = f"torchrun{nodes} --nproc_per_node={ranks} --master-port={environment.master_port}"
    words = shlex.join(["-m", "ddp_trainer", *sys.argv[1:]])
    command = (
        environment.command or f"{torchrun if environment.under_torchrun else 'python'} {words}"
    )
    return RESUME_NEVER.sub("", command)
