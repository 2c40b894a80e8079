"""The Python stacks of the ranks' main threads: for the report of a hang, and on demand."""

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_trainer.config.errors import require
from ddp_trainer.config.run_dirs import check_links, require_run_dir
from ddp_trainer.observers.failures.status import RankStatus, StatusBoard

PROCESSES = "processes.json"
STACKS = "stacks.log"
ANSWER_SECONDS = 15.0
"""How long ``doctor RUN_DIR`` waits for the ranks."""
COLLECT_SECONDS = 3.5
"""How long the asking rank waits; other ranks look for a question with every heartbeat."""
SILENT_SECONDS = 3.0
"""A process of this host that has sent no heartbeat for this long is asked by a signal."""
QUIT_SECONDS = 1.5
"""How long a process may take to write its stacks after SIGQUIT."""
MAX_FRAMES = 40
MAX_COLLECTIVES = 3
TRACE_ENTRY = "#{collective_seq_id} {profiling_name} {input_sizes} {state}"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def with_stack(status: RankStatus) -> RankStatus:
    """Return `status`, of this process, with the main thread's stack and the last collectives.

    If another thread waits in a collective, which only code of a user calls there, its stack is
    returned instead.
    """
    tops = sys._current_frames()
    main = tops.pop(threading.main_thread().ident or 0)
    stacks = [replace(status, frames=frames_of(top)) for top in (main, *tops.values())]
    stack = next((other for other in stacks if other.collective), stacks[0])
    return replace(stack, collectives=last_collectives())


def frames_of(top: FrameType) -> list[str]:
    """Return the frames of a thread, the innermost first. top: the innermost frame."""
    frames = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_stack(top)
    ]
    return frames[:MAX_FRAMES]


def last_collectives() -> list[str]:
    """Return the last collectives, from torch's flight recorder.

    A collective has the same sequence number on all ranks.
    """
    try:
        import torch._C._distributed_c10d as c10d  # torch has no public name for it

        entries: list[dict[str, Any]] = []
        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
            if dump := getattr(c10d, name, None):
                entries += json.loads(dump(True, False)).get("entries", [])
        return [
            TRACE_ENTRY.format_map(entry).removesuffix(" scheduled")
            for entry in entries[-MAX_COLLECTIVES:]
        ]
    except Exception:  # another version of torch may lack this; the report is then shorter
        return []


class StackFile:
    """A file in memory into which this process writes the stacks of its threads on SIGQUIT.

    The process does so even if its interpreter is blocked. Another process of the same user reads
    the file as /proc/PID/fd/NUMBER. The file disappears when the process ends.
    """

    NAME = "ddp_trainer stacks"

    def __init__(self) -> None:
        self.file = open(os.memfd_create(self.NAME), "r+b", 0)  # noqa: SIM115
        self.size = 0
        # `__main__` had registered it, to write to stderr
        self.was_registered = faulthandler.unregister(signal.SIGQUIT)
        faulthandler.register(signal.SIGQUIT, self.file, all_threads=True, chain=False)

    def has_grown(self) -> bool:
        """Return whether SIGQUIT came since the last call."""
        size = self.size
        self.size = os.fstat(self.file.fileno()).st_size
        return self.size > size

    def close(self) -> None:
        """Restore the former effect of SIGQUIT, and close the file."""
        if self.was_registered:
            faulthandler.register(signal.SIGQUIT, file=2)
        else:
            faulthandler.unregister(signal.SIGQUIT)
        self.file.close()


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank."""

    rank: int
    host: str
    pid: int
    stack_file: int
    """The file descriptor of the `StackFile` in that process."""

    @property
    def is_valid(self) -> bool:
        """Whether all fields have the types that they should have."""
        numbers = (self.rank, self.pid, self.stack_file)
        return isinstance(self.host, str) and all(type(number) is int for number in numbers)

    @property
    def path(self) -> Path:
        """The path at which other processes on the same host find the `StackFile`."""
        return Path(f"/proc/{self.pid}/fd/{self.stack_file}")

    @property
    def is_here(self) -> bool:
        """Whether the process was started on this host."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Return whether the process, and not a later one with its `pid`, runs on this host."""
        try:
            return self.is_here and StackFile.NAME in os.readlink(self.path)
        except OSError:  # it has ended, or belongs to somebody else
            return False

    def frames(self, *, wake: bool) -> list[str]:
        """Return the main thread's frames, which SIGQUIT makes it write; [] without an answer.

        The process must be alive. wake: continue it if it is stopped, because a stopped process
        does not answer.
        """
        try:
            size = self.path.stat().st_size
            os.kill(self.pid, signal.SIGQUIT)
            if wake:
                os.kill(self.pid, signal.SIGCONT)
            deadline = time.monotonic() + QUIT_SECONDS
            while self.path.stat().st_size == size and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.1)  # it may still be writing
            return parse(self.path.read_bytes()[size:].decode(errors="replace"))
        except OSError:  # it has ended
            return []


def parse(text: str) -> list[str]:
    """Return the frames of the main thread, the last thread in `text`, written by faulthandler."""
    last = text.rpartition("(most recent call first):")[2]
    return [f"{file}:{line} in {name}" for file, line, name in FRAME.findall(last)]


class StackExchange:
    """Lets a rank ask all ranks for their stacks. Collective: every rank must construct one.

    To ask, a rank adds 1 to a counter in the store of `board`, which the others look at with every
    heartbeat. own: a function that returns the status of this rank.
    """

    def __init__(self, board: StatusBoard, own: Callable[[], RankStatus]) -> None:
        self.board = board
        self.own = own
        self.file = StackFile()
        self.num_answered = 0
        process = [board.world.rank, socket.gethostname(), os.getpid(), self.file.file.fileno()]
        self.processes = [RankProcess(*values) for values in board.world.all_gather_object(process)]

    def ask(self, *, wake: bool) -> None:
        """Ask all ranks for their stack.

        wake: whether to continue stopped processes (SIGCONT) so that they answer, which is right
        only if the job is about to be ended.
        """
        if wake:
            self.board.store.set("wake", "")
        self.board.store.add("questions", 1)
        self.answer()

    def answer(self) -> None:
        """If a rank has asked, publish the stacks of this rank and of silent ranks on this host."""
        num_questions = self.board.store.add("questions", 0)
        if num_questions == self.num_answered:
            return
        self.num_answered = num_questions
        self.board.publish(with_stack(self.own()))
        wake = self.board.store.check(["wake"])
        for process in filter(RankProcess.is_alive, self.processes):
            status = self.board.status(process.rank)
            if status is not None and time.time() - status.heartbeat > SILENT_SECONDS:
                self.board.publish_frames(status, process.frames(wake=wake))

    def collect(self) -> list[RankStatus]:
        """Wait some seconds for the answers, and return the status and stack of all ranks, by rank.

        The status of a rank that does not answer is its last heartbeat, without a stack.
        """
        stacks = [RankStatus(p.rank, p.host, "an unknown phase", step=0) for p in self.processes]
        deadline = time.monotonic() + COLLECT_SECONDS
        while time.monotonic() < deadline and not all(stack.frames for stack in stacks):
            time.sleep(0.05)
            stacks = [
                stack if stack.frames else self.board.status(stack.rank) or stack
                for stack in stacks
            ]
        return stacks


def read_processes(run_dir: Path) -> list[RankProcess]:
    """Return the processes of the running or last job in `run_dir`; [] if there was none."""
    try:
        processes = [
            RankProcess(**values) for values in json.loads((run_dir / PROCESSES).read_text())
        ]
    except (OSError, ValueError, TypeError, RecursionError):
        return []
    # The file may be from somebody else, and a text with slashes would lead out of /proc/PID/fd.
    return [process for process in processes if process.is_valid]


def stacks_of(run_dir: Path) -> str:
    """Return the stacks of the ranks that train in `run_dir` now.

    Raises ConfigError if no rank on this host answers, and the errors of `check_links`.
    """
    require_run_dir(run_dir)
    check_links(run_dir)
    processes = read_processes(run_dir)
    hosts = {process.host for process in processes}
    require(
        not hosts or socket.gethostname() in hosts,
        f"no rank of {run_dir} runs on this host: run doctor on one of {', '.join(hosts)}",
    )
    running = [process for process in processes if process.is_alive()]
    require(bool(running), f"no job of this user is running in {run_dir} on this host")
    alive = running[0]
    path = run_dir / STACKS
    deadline = time.monotonic() + ANSWER_SECONDS
    path.unlink(missing_ok=True)
    os.kill(alive.pid, signal.SIGQUIT)
    while not path.exists():
        require(
            time.monotonic() < deadline,
            f"rank {alive.rank} (process {alive.pid}) has not written the stacks: try again, or, "
            f"if the process is stopped, continue it with kill -CONT {alive.pid}",
        )
        time.sleep(0.1)
    return path.read_text()
