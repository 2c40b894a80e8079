"""Real processes with a deadline: commands, and ranks that are forked from a process that has
imported torch.
"""

import atexit
import faulthandler
import multiprocessing
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_trainer.distributed.environment import limit_spinning

limit_spinning()  # as the command line does: the tests that run at the same time share the cores

from torch.distributed import TCPStore  # noqa: E402


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


def torchrun(ranks: int, *options: str) -> list[str]:
    """Return the words that start torchrun on this machine, with a port of its own, so that several
    can run at once.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc_per_node={ranks}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
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
    module: str = "ddp_trainer",
    **extra: str,
) -> Finished:
    """Run the command line with `overrides`: plain python for ranks=None, else torchrun with so
    many ranks.

    The process is forked from one that has imported torch, to save a second, unless `extra`
    variables could change how Python starts.
    """
    if ranks is not None:
        return _run_forked(
            [*torchrun(ranks)[2:], "-m", module, *overrides], cwd or Path.cwd(), deadline, **extra
        )
    if module == "ddp_trainer" and not extra:
        return _run_forked(["ddp_trainer", *overrides], cwd or Path.cwd(), deadline)
    return run_command(
        [sys.executable, "-m", module, *overrides], deadline=deadline, cwd=cwd, **extra
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
    modules = [
        "ddp_trainer.training_run",
        "torch._dynamo",
        "torch.utils.tensorboard",
        "torchvision.models",
    ]
    context.set_forkserver_preload([*modules, "runs", "gc_freeze"])  # not timm, which imports wandb
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 passes no sys.path
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ensure_running()
    return context


def _command_line(words: Sequence[str], cwd: Path, variables: dict[str, str], output: str) -> None:
    """Become ``python -m`` with `words`, which writes stdout and stderr to the file `output`."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ |= variables
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    sys.argv = list(words)
    faulthandler.enable()
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not call


def _run_forked(words: Sequence[str], cwd: Path, deadline: float, **extra: str) -> Finished:
    with tempfile.NamedTemporaryFile("r+") as output:
        arguments = (words, cwd, clean_environment(PYTHONFAULTHANDLER="1", **extra), output.name)
        process = forkserver().Process(target=_command_line, args=arguments)
        process.start()
        process.join(deadline)
        if process.exitcode is None:
            end_with_descendants(process)
            pytest.fail(f"still running after {deadline} s: {' '.join(words)}\n{output.read()}")
        return Finished(process.exitcode, output.read())


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
