"""The Python stacks of the main threads of ranks, and which ranks wait for others."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

WAITS = (
    "/torch/distributed/", "/torch/autograd/graph.py", "/torch/cuda/streams.py", "/ddp_trainer/sync/",
    "/ddp_trainer/training/control.py", "/ddp_trainer/training/metrics.py", "/ddp_trainer/distributed/process_group.py",
)  # fmt: skip
"""Parts of the path of the innermost frame of a rank that waits for others: in a collective, or DDP in backward.

With NCCL a collective returns at once, and the host waits where it reads the result.
"""
QUIT_SECONDS = 1.5
"""How long a process may take to write its stacks after SIGQUIT."""
MAX_FRAMES, MAX_COLLECTIVES = 40, 3
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""The functions of torch that return its flight recorders, of gloo and of NCCL."""
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
THREAD = re.compile(r"^(Thread|Current thread) 0x.*\(most recent call first\)")


class Frame(NamedTuple):
    """A place in a Python program."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


@dataclass(frozen=True, slots=True)
class RankStack:
    """The phase, the step and the stack of a rank."""

    rank: int
    host: str
    phase: str
    step: int
    frames: list[Frame]
    """Of its main thread, the innermost first; empty if unknown."""
    collectives: tuple[str, ...] = ()
    """Its last collectives, the newest last; empty if unknown."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks, as far as its innermost frame shows."""
        return bool(self.frames) and any(part in self.frames[0].file for part in WAITS)

    @property
    def place(self) -> Frame | None:
        """The innermost frame outside of Python's and torch's own files, else the innermost."""
        own = [frame for frame in self.frames if not is_library(frame.file)]
        return (own or self.frames or [None])[0]

    def text(self) -> str:
        """Return the whole stack, the innermost frame first."""
        title = f"rank {self.rank} on {self.host}, in {self.phase} after step {self.step}:"
        last = [f"  last collectives: {', '.join(self.collectives)}"] if self.collectives else []
        return "\n".join([title, *(f"  {frame}" for frame in self.frames or ["unknown"]), *last])

    @classmethod
    def of(cls, values: list[Any]) -> "RankStack":
        """Return the stack that was sent as the JSON value `values`."""
        rank, host, phase, step, frames, collectives = values
        return cls(rank, host, phase, step, [Frame(*frame) for frame in frames], tuple(collectives))


def is_library(path: str) -> bool:
    """Return whether `path` belongs to Python, to torch or to this package's way of waiting."""
    is_installed = "/site-packages/" in path or "/dist-packages/" in path
    is_python = path.startswith(("<", os.path.dirname(os.__file__) + "/")) and not is_installed
    return is_python or any(part in path for part in ("/torch/", *WAITS))


def main_thread_frames() -> list[Frame]:
    """Return the frames of this process's main thread, the innermost first."""
    top = sys._current_frames().get(threading.main_thread().ident or 0)
    entries = traceback.extract_stack(top)[-MAX_FRAMES:] if top is not None else []
    return [Frame(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(entries)]


class StackFile:
    """An unnamed file into which SIGQUIT makes this process write the stacks of its threads, whatever it is doing.

    Another process of the same user reads it as /proc/PID/fd/NUMBER. Nothing is left of it when the process ends.
    """

    NAME = "ddp_trainer stacks"

    def __init__(self) -> None:
        has_memory_files = hasattr(os, "memfd_create")  # Linux
        self.file = open(os.memfd_create(self.NAME), "r+b", 0) if has_memory_files else tempfile.TemporaryFile()  # noqa: SIM115
        self.size = 0
        faulthandler.register(signal.SIGQUIT, self.file, all_threads=True, chain=False)

    @property
    def number(self) -> int:
        """The number of the file descriptor."""
        return self.file.fileno()

    @classmethod
    def exists(cls, pid: int, number: int) -> bool:
        """Return whether process `pid` of this host and user has such a file, as descriptor `number`."""
        try:
            return cls.NAME in os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:  # it has ended, or belongs to somebody else
            return False

    def has_grown(self) -> bool:
        """Return whether SIGQUIT came since the last call."""
        size, self.size = self.size, os.fstat(self.number).st_size
        return self.size > size

    def close(self) -> None:
        """Restore what SIGQUIT did before."""
        faulthandler.unregister(signal.SIGQUIT)
        self.file.close()


def frames_by_signal(pid: int, number: int, *, wake: bool) -> list[Frame]:
    """Return the frames of the main thread of another process of this host; [] if unknown.

    number: that of its `StackFile`. wake: continue it if it is stopped, because a stopped process does not answer.
    """
    path = Path(f"/proc/{pid}/fd/{number}")
    if not StackFile.exists(pid, number):  # another process that has this number now would be ended by SIGQUIT
        return []
    try:
        size = path.stat().st_size
        os.kill(pid, signal.SIGQUIT)
        if wake:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + QUIT_SECONDS
        while path.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)  # it may still be writing
        with open(path, "rb") as file:
            file.seek(size)
            return parse(file.read().decode(errors="replace"))
    except OSError:  # it has ended, or belongs to somebody else
        return []


def parse(text: str) -> list[Frame]:
    """Return the frames of the main thread from what faulthandler wrote: it is the last thread."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if THREAD.match(line):
            frames = []
        elif match := FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
    return frames


def absent_ranks(stacks: Sequence[RankStack]) -> list[RankStack]:
    """Return the ranks that the others wait for: those that are not waiting, else those that wait elsewhere.

    Of ranks that all wait, or none of which waits, those count that have come least far, or are fewer in one place.
    """
    absent = [stack for stack in stacks if not stack.is_waiting]
    if absent and len(absent) < len(stacks):
        return absent
    first = min(stack.step for stack in stacks)
    behind = [stack for stack in stacks if stack.step == first]
    if len(behind) < len(stacks):
        return behind
    places = Counter((stack.phase, stack.place) for stack in stacks)
    if len(places) == 1:
        return list(absent)
    fewest = min(places.values())
    return [stack for stack in stacks if places[stack.phase, stack.place] == fewest]


def grouped_lines(stacks: Sequence[RankStack]) -> list[str]:
    """Return a line for each place where ranks are, those that the others wait for first."""
    groups: dict[tuple[str, int, Frame | None], list[int]] = {}
    absent = {stack.rank for stack in absent_ranks(stacks)}
    for stack in sorted(stacks, key=lambda stack: (stack.rank not in absent, stack.rank)):
        groups.setdefault((stack.phase, stack.step, stack.place), []).append(stack.rank)
    return [
        f"{numbers(ranks)}: {phase} after step {step}, at {place or 'an unknown place'}"
        for (phase, step, place), ranks in groups.items()
    ]


def numbers(ranks: Sequence[int], limit: int = 8) -> str:
    """Return ``rank 1``, or ``ranks 0, 2, 3``."""
    listed = ", ".join(map(str, ranks[:limit])) + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def own_stack(rank: int, phase: str, step: int) -> RankStack:
    """Return the stack of this rank."""
    return RankStack(rank, socket.gethostname(), phase, step, main_thread_frames(), last_collectives())


def last_collectives() -> tuple[str, ...]:
    """Return the last collectives of this process, numbered alike on all ranks, from torch's flight recorder."""
    try:
        import torch._C._distributed_c10d as c10d  # torch has no public name for it

        dumps: list[Any] = [getattr(c10d, name, None) for name in RECORDERS]
        entries = [entry for dump in dumps if dump for entry in json.loads(dump(True, False)).get("entries", [])]
        return tuple(
            f"#{entry['collective_seq_id']} {entry['profiling_name']} {entry['input_sizes']}"
            f"{'' if entry['state'] == 'scheduled' else ' ' + entry['state']}"
            for entry in entries[-MAX_COLLECTIVES:]
        )
    except Exception:  # of another version of torch: the report goes without
        return ()
