"""The status of ranks: their progress, the Python stacks of their main threads, and which ranks
wait for others.
"""

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

WAITS = (
    "/torch/distributed/",
    "/torch/autograd/graph.py",
    "/torch/cuda/streams.py",
    "/ddp_trainer/sync/",
    "/ddp_trainer/training/control.py",
    "/ddp_trainer/training/metrics.py",
    "/ddp_trainer/distributed/process_group.py",
)
"""A rank waits for others if its innermost frame has one of these in its path: a collective, or DDP
in backward.

With NCCL a collective returns at once, and the host waits where it reads the result.
"""
QUIT_SECONDS = 1.5
"""How long a process may take to write its stacks after SIGQUIT."""
BUSY_SHARE = 0.1
"""A thread counts as computing above this share of a core. The share is low, because ranks may
share cores.
"""
MAX_FRAMES = 40
MAX_COLLECTIVES = 3
MAX_RANKS = 8
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The position of a rank in training, and its stack; without the stack it is a heartbeat, sent
    every second.
    """

    rank: int
    host: str
    phase: str
    step: int
    heartbeat: float = 0.0
    """The time of the heartbeat, in unix seconds: different for each heartbeat."""
    idle_seconds: float = 0.0
    """How many of the `still_seconds` the main thread did not compute; on a GPU all of them (see
    `ProgressClock`).
    """
    still_seconds: float = 0.0
    """How long ago the rank last entered a phase, the same one or another."""
    frames: Sequence[str] = ()
    """The frames of the rank's main thread, as ``file:line in function``, the innermost first;
    empty if unknown.
    """
    collectives: Sequence[str] = ()
    """The last collectives of the rank, the newest last; empty if unknown."""

    def line(self, failure: str) -> str:
        """Return one line of a report: the rank, then `failure`, then its phase and step."""
        return f"rank {self.rank} on {self.host} {failure} {self.phase} after step {self.step}"

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for other ranks, as far as its innermost frame shows."""
        return any(part in frame for frame in self.frames[:1] for part in WAITS)

    @property
    def place(self) -> str:
        """The innermost frame that is not `is_library`, else the innermost frame."""
        own = [frame for frame in self.frames if not is_library(frame)]
        return [*own, *self.frames, "an unknown place"][0]

    def text(self) -> str:
        """Return the whole stack, the innermost frame first."""
        title = f"rank {self.rank} on {self.host}, in {self.phase} after step {self.step}:"
        last = [f"  last collectives: {', '.join(self.collectives)}"] if self.collectives else []
        return "\n".join([title, *(f"  {frame}" for frame in self.frames or ["unknown"]), *last])


class ProgressClock:
    """Measures how long the main thread made no progress (still), and how long of this time it did
    not compute (idle).

    The main thread adds 1 to `count` when it progresses; another thread calls `update`.
    can_be_busy: whether CPU time is a sign of computing; on a GPU it is not, because a thread that
    waits for a GPU uses CPU time too.
    """

    def __init__(self, *, can_be_busy: bool) -> None:
        self.count = 0
        self.can_be_busy = can_be_busy
        self.idle_seconds = self.still_seconds = 0.0
        self._clock = time.pthread_getcpuclockid(
            threading.main_thread().ident or threading.get_ident()
        )
        self._last_count = 0
        self._last_cpu = 0.0

    def update(self, elapsed: float) -> None:
        """Record whether there was progress in the last `elapsed` seconds."""
        count = self.count
        cpu = time.clock_gettime(self._clock)
        if count != self._last_count:
            self.idle_seconds = self.still_seconds = 0.0
        else:
            self.still_seconds += elapsed
            if not self.can_be_busy or cpu - self._last_cpu < BUSY_SHARE * elapsed:
                self.idle_seconds += elapsed
        self._last_count = count
        self._last_cpu = cpu


def is_library(frame: str) -> bool:
    """Return whether `frame` (``file:line in function``) is in Python, torch or a file of `WAITS`,
    where ranks wait.
    """
    is_installed = "/site-packages/" in frame or "/dist-packages/" in frame
    is_python = frame.startswith(("<", os.path.dirname(os.__file__) + "/")) and not is_installed
    return is_python or any(part in frame for part in ("/torch/", *WAITS))


def with_stack(status: RankStatus) -> RankStatus:
    """Return `status`, of this process, with the stack of the main thread and the last collectives
    added.
    """
    top = sys._current_frames()[threading.main_thread().ident or 0]
    entries = islice(traceback.walk_stack(top), MAX_FRAMES)
    frames = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in entries
    ]
    return replace(status, frames=frames, collectives=last_collectives())


class StackFile:
    """An unnamed file into which SIGQUIT makes this process write the stacks of its threads,
    whatever it is doing.

    Another process of the same user reads it as /proc/PID/fd/NUMBER. Nothing is left of it when the
    process ends.
    """

    NAME = "ddp_trainer stacks"

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # Linux
            self.file = open(os.memfd_create(self.NAME), "r+b", 0)  # noqa: SIM115
        else:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.size = 0
        # by `__main__`, to write to stderr
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
    def path(self) -> Path:
        """The path at which other processes on the same host find the `StackFile`."""
        return Path(f"/proc/{self.pid}/fd/{self.stack_file}")

    def is_alive(self) -> bool:
        """Return whether the process runs on this host as this user; a later process with its `pid`
        does not count.
        """
        try:
            return self.host == socket.gethostname() and StackFile.NAME in os.readlink(self.path)
        except OSError:  # it has ended, or belongs to somebody else
            return False

    def frames(self, *, wake: bool) -> list[str]:
        """Make the process write its stacks, by SIGQUIT, and return the main thread's frames; [] if
        it does not answer.

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
    """Return the frames of the main thread, which is the last thread in the `text` of
    faulthandler.
    """
    last = text.rpartition("(most recent call first):")[2]
    return [f"{file}:{line} in {name}" for file, line, name in FRAME.findall(last)]


def absent_ranks(stacks: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that the others wait for; [] if several ranks all wait and the rules below
    choose all of them.

    Chosen are the ranks that do not wait, or all ranks if all wait; of these, the ranks at the
    lowest step; of these, the ranks whose place in the code has the fewest ranks.
    """
    places = Counter((stack.phase, stack.place) for stack in stacks)
    order = [(stack.is_waiting, stack.step, places[stack.phase, stack.place]) for stack in stacks]
    absent = [
        stack for stack, position in zip(stacks, order, strict=True) if position == min(order)
    ]
    return [] if len(absent) == len(stacks) > 1 and stacks[0].is_waiting else absent


def grouped_lines(stacks: Sequence[RankStatus]) -> list[str]:
    """Return a line for each place in the code where ranks are, first for the ranks that the others
    wait for.
    """
    groups: dict[tuple[str, int, str], list[int]] = {}
    absent = {stack.rank for stack in absent_ranks(stacks)}
    for stack in sorted(stacks, key=lambda stack: (stack.rank not in absent, stack.rank)):
        groups.setdefault((stack.phase, stack.step, stack.place), []).append(stack.rank)
    lines = []
    for (phase, step, place), ranks in groups.items():
        more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
        numbers = (
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:MAX_RANKS]))}{more}"
        )
        lines.append(f"{numbers}: {phase} after step {step}, at {place}")
    return lines


def last_collectives() -> list[str]:
    """Return the last collectives, from torch's flight recorder; one collective has the same number
    on all ranks.
    """
    try:
        import torch._C._distributed_c10d as c10d  # torch has no public name for it

        dumps: list[Any] = [
            getattr(c10d, f"_dump_{name}_trace_json", None) for name in ("fr", "nccl")
        ]
        entries = [
            entry
            for dump in dumps
            if dump
            for entry in json.loads(dump(True, False)).get("entries", [])
        ]
        return [
            f"#{entry['collective_seq_id']} {entry['profiling_name']} {entry['input_sizes']}"
            f"{'' if entry['state'] == 'scheduled' else ' ' + entry['state']}"
            for entry in entries[-MAX_COLLECTIVES:]
        ]
    except Exception:  # another version of torch may lack this; the report is then shorter
        return []
