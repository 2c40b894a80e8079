"""The report of a failure: its text, its files, and the error file that torchrun prints."""

import json
import re
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_trainer.distributed.environment import Environment
from ddp_trainer.files import replace_text

REPORTED = "reported by FailureMonitor"
"""The note on an error that needs no further report."""
RESUME_NEVER = re.compile(r""" +(['"]?)\+{0,2}resume=never\1(?= |$)""")


class Reporter:
    """Writes this rank's reports to the run directory, and to torchrun's error file or stderr."""

    def __init__(self, run_dir: Path, environment: Environment) -> None:
        self._run_dir = run_dir
        self._environment = environment

    def report(
        self,
        lines: Sequence[str],
        *,
        title: str,
        name: str,
        text: str,
        since: float | None = None,
        is_repeatable: bool = False,
    ) -> None:
        """Write `text` to a file, and report `lines`, and `title` with the path of that file.

        name: the name of the file in the run directory. since: as for the function `report`.
        is_repeatable: whether the same command would fail again.
        """
        paths = (self._run_dir / "checkpoints").glob("step-*.pt")
        newest = max(paths, key=lambda path: (len(path.stem), path.stem), default="none yet")
        lines = [*lines, f"{title}: {self.write(name, text)}"]
        whole = self._text(lines, checkpoint=str(newest), is_repeatable=is_repeatable)
        report(whole, self._environment, since=since)

    def write_in_advance(self, line: str) -> None:
        """Write the error file with `line`, because a killed rank cannot report anything."""
        if path := self._environment.error_file:
            newest = f"the newest in {self._run_dir / 'checkpoints'}"
            with suppress(OSError):  # a full disk must not end the monitor's thread
                write_error_file(path, self._text([line], checkpoint=newest))

    def withdraw(self) -> None:
        """Remove the error file that was written in advance."""
        if path := self._environment.error_file:
            Path(path).unlink(missing_ok=True)

    def write(self, name: str, text: str) -> str:
        """Write a file in the run directory; return its path, or a text with the error."""
        path = self._run_dir / name
        try:
            replace_text(path, text.rstrip() + "\n")
        except OSError as error:  # a full disk, for example
            return f"{path} could not be written ({error.strerror})"
        return str(path)

    def _text(self, lines: Sequence[str], *, checkpoint: str, is_repeatable: bool = False) -> str:
        command = command_to_continue(self._environment)
        advice = f"to continue: {command}"
        if is_repeatable:
            advice = f"to start anew with other values: {command} resume=never"
        return "\n".join([*lines, f"last good checkpoint: {checkpoint}", advice])


def error_lines(error: BaseException) -> list[str]:
    """Return the type and message of `error`, and the code line that raised its first cause."""
    message = " ".join(str(error).split())[:300]
    cause = error
    while cause.__cause__ is not None:  # raise … from cause
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)[-1:]
    places = [
        f"at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line or 'no source'}"
        for frame in frames
    ]
    return [f"{type(error).__name__}: {message}", *places]


def report_failure(error: Exception, environment: Environment) -> None:
    """Report `error` with its traceback, unless a `FailureMonitor` has reported its root cause."""
    if REPORTED not in getattr(error, "__notes__", ()):
        report("".join(traceback.format_exception(error)), environment)


def report(text: str, environment: Environment, *, since: float | None = None) -> None:
    """Write `text` to torchrun's error file, or else to stderr.

    since: when the failure began, in unix seconds; None: now. If several ranks have error files,
    torchrun prints the file with the earliest time.
    """
    with suppress(OSError):
        if environment.error_file is not None:
            return write_error_file(environment.error_file, text, since=since)
    with suppress(OSError):  # stderr may be closed
        print(text, file=sys.stderr, flush=True)


def write_error_file(path: str, text: str, *, since: float | None = None) -> None:
    """Write `text` to `path`, in the format of torchrun's error files. since: as for `report`."""
    details = {"py_callstack": text, "timestamp": str(int(since or time.time()))}
    temporary = Path(f"{path}.writing")
    temporary.write_text(
        json.dumps({"message": {"message": text.splitlines()[0], "extraInfo": details}})
    )
    temporary.replace(path)


def command_to_continue(environment: Environment) -> str:
    """Return the command line that started this run, without resume=never, so that it resumes."""
    return RESUME_NEVER.sub("", environment.command or own_command(environment))


def own_command(environment: Environment) -> str:
    """Return the command that starts this program again; in a notebook, say to run the cell."""
    main = sys.modules["__main__"]
    if not hasattr(main, "__file__"):
        return "run the same cell"
    module = main.__spec__  # None for a script
    program = ["-m", module.name.removesuffix(".__main__")] if module else sys.argv[:1]
    words = shlex.join([*program, *sys.argv[1:]])
    if not environment.under_torchrun:
        return f"python {words}"
    num_nodes = environment.world_size // environment.local_world_size
    nodes = f" --nnodes={num_nodes} …" if num_nodes > 1 else ""
    return (
        f"torchrun{nodes} --nproc_per_node={environment.local_world_size}"
        f" --master-port={environment.master_port} {words}"
    )
