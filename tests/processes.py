"""Real processes with a deadline: commands, and ranks that are forked from a process that has
imported torch.
"""

import atexit
import faulthandler
import multiprocessing
import os
import queue
import resource
import runpy
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_trainer.distributed.environment import limit_spinning

limit_spinning()  # as the command line does: the tests that run at the same time share the cores

from torch.distributed import TCPStore  # noqa: E402
from torch.distributed.elastic.multiprocessing.subprocess_handler import (  # noqa: E402
    subprocess_handler,
)
from torch.distributed.launcher.api import LaunchConfig  # noqa: E402

from ddp_trainer.launchers import local  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
OWN = "own_dataset,own_loss,own_metric,own_observer"
"""The examples that register parts, as plug-ins."""


class Finished(NamedTuple):
    """The exit code of a launch, and its stdout and stderr as a user sees them."""

    code: int
    output: str


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without what a launcher or Hydra put there."""
    ours = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HYDRA_FULL_ERROR",
    ]
    return {key: value for key, value in os.environ.items() if key not in ours} | extra


def with_path(*folders: Path) -> str:
    """Return a PYTHONPATH that begins with `folders` and the project."""
    already = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), str(ROOT), already])


def plugins(names: str, folder: Path = EXAMPLES) -> dict[str, Any]:
    """Return the environment variables with which a command loads modules of `folder`."""
    return {"DDP_TRAINER_PLUGINS": names, "PYTHONPATH": with_path(folder)}


PACE = "observer=[pace]"
"""Override for a training whose steps take 0.1 s, where `PACING` is in the environment."""
PACING = plugins("pacing", ROOT / "tests" / "chaos")


_holders: deque[socket.socket] = deque()
atexit.register(lambda: [holder.close() for holder in _holders])


def held_port() -> int:
    """Return a free port that nobody else gets until this process has asked for 50 more.

    It stays bound by a socket that does not listen. So Linux gives it to no connection and to
    nobody who asks for any port, but a server that sets SO_REUSEADDR can listen on it.
    """
    if len(_holders) == 50:
        _holders.popleft().close()
    holder = socket.socket()
    _holders.append(holder)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder.getsockname()[1]


def torchrun(ranks: int, *options: str) -> list[str]:
    """Return the words that start torchrun on this machine, with a port of its own, so that several
    can run at once.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc_per_node={ranks}",
        "--master-addr=127.0.0.1",
        f"--master-port={held_port()}",
        *options,
    ]


def start_command(
    command: Sequence[str], *, cwd: Path | None = None, **extra: str
) -> subprocess.Popen[str]:
    """Start `command` in a session of its own, with both its outputs in one pipe."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=clean_environment(PYTHONFAULTHANDLER="1", **extra),
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_command(
    command: list[str], *, deadline: float = 120, cwd: Path | None = None, **extra: str
) -> Finished:
    """Run `command` in a session of its own; past `deadline` seconds end all of it and fail the
    test.
    """
    process = start_command(command, cwd=cwd, **extra)
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        end_with_descendants(process)
        output, _ = process.communicate()
        pytest.fail(f"still running after {deadline} s: {' '.join(command)}\n{output}")
    return Finished(process.returncode, output)


def processes_with(variable: str) -> list[int]:
    """Return the ids of the processes that have ``NAME=value`` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def end_with_descendants(process: Any) -> None:
    """Abort the processes that `process` has started, which write their stacks, and kill all of
    them.
    """
    tree = [process.pid]
    for pid in tree:  # grows
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            tree += map(int, task.read_text().split())
    for number, pids in ((signal.SIGABRT, tree[1:]), (signal.SIGKILL, tree)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(1)


def launch(
    *overrides: str,
    ranks: int | None = None,
    deadline: float = 120,
    cwd: Path | None = None,
    script: str | None = None,
    **extra: Any,
) -> Finished:
    """Run the command line with `overrides`, or `script`: plain python for ranks=None, else
    torchrun with so many ranks.

    All processes are forked from one that has imported torch, to save two seconds each, unless
    `extra` variables could change how Python starts.
    """
    words = [*([script] if script else ["-m", "ddp_trainer"]), *overrides]
    if ranks is None and extra and not _is_plugin_path(extra):
        return run_command([sys.executable, *words], deadline=deadline, cwd=cwd, **extra)
    return run_forked(words, ranks=ranks, deadline=deadline, cwd=cwd, **extra)


def run_forked(
    words: Sequence[str],
    *,
    ranks: int | None = None,
    deadline: float = 120,
    **options: Any,
) -> Finished:
    """Run python, or torchrun, with `words` in processes that are forked from one with torch."""
    with tempfile.NamedTemporaryFile("r+") as output:
        process = start_launch(words, ranks=ranks, output=output.name, **options)
        process.join(deadline)
        if process.exitcode is None:
            end_with_descendants(process)
            pytest.fail(f"still running after {deadline} s: {' '.join(words)}\n{output.read()}")
        return Finished(process.exitcode, output.read())


def start_launch(
    words: Sequence[str],
    *,
    ranks: int | None,
    output: str = os.devnull,
    cwd: Path | None = None,
    options: Sequence[str] = (),
    file_kib: int | None = None,
    **extra: str,
) -> Any:
    """Start what `run_forked` runs, which writes stdout and stderr to the file `output`; return
    its process.

    options: of torchrun. file_kib: as ``ulimit -f`` limits the size of each file.
    """
    launcher = [] if ranks is None else torchrun(ranks, *options)[1:]
    variables = clean_environment(PYTHONFAULTHANDLER="1", **extra)
    process = forkserver().Process(
        target=_command_line,
        args=([*launcher, *words], cwd or Path.cwd(), variables, output, file_kib),
    )
    process.start()
    return process


def _is_plugin_path(variables: dict[str, str]) -> bool:
    """Return whether `variables` only add plug-ins, and hide neither torch nor this package."""
    path = variables.get("PYTHONPATH", "")
    folders = [Path(folder) for folder in path.split(os.pathsep) if folder]
    return {*variables} <= {"DDP_TRAINER_PLUGINS", "PYTHONPATH"} and not any(
        (folder / name).is_dir() and folder != ROOT
        for folder in folders
        for name in ("torch", "ddp_trainer")
    )


def succeed(*overrides: str, **options: Any) -> Finished:
    """Launch, and fail the test with the output unless the exit code is 0."""
    done = launch(*overrides, **options)
    assert done.code == 0, done.output
    return done


def wait_for(condition: Callable[[], object], *, seconds: float = 90) -> None:
    """Return once `condition` holds; fail the test after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# --- ranks without torchrun, so that a test takes a second ---


def _rank(
    rank: int, world_size: int, port: int, results: Any, function: Callable[..., Any], args: tuple
) -> None:
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
    }
    os.environ |= {name: str(number) for name, number in (numbers | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        results.put((rank, function(*args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def forkserver() -> Any:
    """Return the multiprocessing context whose processes are forked from one that has imported
    torch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["before_forks"])
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 passes no sys.path
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ensure_running()
    return context


def _command_line(
    words: Sequence[str],
    cwd: Path,
    variables: dict[str, str],
    output: str,
    file_kib: int | None,
) -> None:
    """Become ``python`` with `words`, which writes stdout and stderr to the file `output`."""
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    if file_kib is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_kib * 1024, file_kib * 1024))
    subprocess_handler.Popen = ForkedRank  # type: ignore[misc]  # of torchrun
    local.LaunchConfig = partial(LaunchConfig, start_method="fork")  # type: ignore[misc]
    _become(words, variables)


def _become(words: Sequence[str], variables: dict[str, str]) -> None:
    """Become ``python`` with `words`, -m with a module or a script, in a session of its own."""
    os.setsid()
    os.environ.clear()
    os.environ |= variables
    is_module = words[0] == "-m"
    folder = os.getcwd() if is_module else str(Path(words[0]).parent)
    sys.path[:0] = [folder, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = list(words[1:] if is_module else words)
    faulthandler.enable()
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not call


class ForkedRank:
    """A rank that torchrun forks in place of ``Popen([python, "-u", …])``, because torchrun has
    imported torch.
    """

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: Any) -> None:
        self.args = args
        assert args[1] == "-u"
        self.process = multiprocessing.get_context("fork").Process(
            target=_forked_rank, args=(args[2:], env)
        )
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.process.exitcode


def _forked_rank(words: Sequence[str], variables: dict[str, str]) -> None:
    """Do what exec would: forget torchrun's signal handlers, and close the sockets of its store."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the number of the listed directory is closed
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
    _become(words, variables)


def _start(
    world_size: int, results: Any, function: Callable[..., Any], args: tuple
) -> tuple[list[Any], TCPStore]:
    context = forkserver()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank, args=(rank, world_size, store.port, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes, store


def on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, deadline: float = 60
) -> list[Any]:
    """Call a module-level ``function(*args)`` in `world_size` processes; return the results, plain
    data, by rank.
    """
    results = forkserver().Queue()
    processes, _store = _start(world_size, results, function, args)
    try:
        answers = sorted(
            (results.get(timeout=deadline) for _ in processes), key=lambda answer: answer[0]
        )
    except queue.Empty:
        pytest.fail(f"{function.__name__} on {world_size} ranks: no answer in {deadline} s")
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    for _, _, error in answers:
        assert error is None, error
    assert [process.exitcode for process in processes] == [0] * world_size
    return [value for _, value, _ in answers]


def start_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a module-level ``function(*args)`` in so many processes and return them at once: to be
    killed, say.
    """
    results = forkserver().Queue()
    processes, store = _start(world_size, results, function, args)
    processes[0].needed = (results, store)  # as long as the processes live
    return processes
