"""The stacks of all ranks of a job, on one of them: for the report of a hang, and on demand."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_trainer.config.errors import ConfigError, require, require_run_dir
from ddp_trainer.distributed.files import replace_text
from ddp_trainer.distributed.process_group import World
from ddp_trainer.distributed.stacks import RankStack, StackFile, frames_by_signal, own_stack

PROCESSES, STACKS = "processes.json", "stacks.log"
ANSWER_SECONDS = 15.0
"""How long ``doctor RUN_DIR`` waits for the ranks."""
COLLECT_SECONDS = 3.5
"""How long the rank that asks waits for the others, which look for a question with every heartbeat."""
SILENT_SECONDS = 3.0
"""A process of this host without heartbeats for so long is asked by a signal."""
SHOW, EXPLAIN = "show", "explain"
"""The questions: stacks on demand; and those of a job that is about to be ended, for which stopped ranks are woken."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank."""

    rank: int
    host: str
    pid: int
    stack_file: int
    """The number of the descriptor of its `StackFile`."""


def write_processes(processes: Sequence[RankProcess], run_dir: Path) -> None:
    """Write the file by which ``doctor RUN_DIR`` finds the processes of a job."""
    with suppress(OSError):  # a full disk, for example
        replace_text(run_dir / PROCESSES, json.dumps([asdict(process) for process in processes]) + "\n")


def read_processes(run_dir: Path) -> list[RankProcess]:
    """Return what `write_processes` wrote; [] if there is none."""
    try:
        return [RankProcess(**values) for values in json.loads((run_dir / PROCESSES).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def stacks_of(run_dir: Path) -> str:
    """Return where the ranks are that train in `run_dir` now: the content of stacks.log.

    Asks a rank on this host, which asks the others. Raises ConfigError if there is none, or it does not answer.
    """
    require_run_dir(run_dir)
    processes = read_processes(run_dir)
    mine = [process for process in processes if process.host == socket.gethostname()]
    require(
        bool(mine) or not processes,
        f"no rank of {run_dir} runs on this host: call doctor on one of {', '.join({p.host for p in processes})}",
    )
    alive = next((process for process in mine if StackFile.exists(process.pid, process.stack_file)), None)
    if alive is None:
        raise ConfigError(f"no job is running in {run_dir}")
    path = run_dir / STACKS
    before, deadline = modified_at(path), time.monotonic() + ANSWER_SECONDS
    os.kill(alive.pid, signal.SIGQUIT)
    while modified_at(path) == before:
        require(time.monotonic() < deadline, f"rank {alive.rank} (process {alive.pid}) has not answered: try again")
        time.sleep(0.1)
    return path.read_text()


def modified_at(path: Path) -> int:
    """Return when `path` was last written, in nanoseconds; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


class StackExchange:
    """Asks all ranks where they are, and answers. Collective: every rank must construct one.

    A question is a key in `store`: the first rank that sets it collects the answers. heartbeat: returns the unix time
    of the last heartbeat of a rank and where it was then, (phase, step); None if it has sent none.
    """

    def __init__(
        self, world: World, store: dist.Store, heartbeat: Callable[[int], tuple[float, str, int] | None]
    ) -> None:
        self.world, self.store, self.heartbeat = world, store, heartbeat
        self.file, self.number = StackFile(), 0
        own = RankProcess(world.rank, socket.gethostname(), os.getpid(), self.file.number)
        self.processes = [RankProcess(*values) for values in world.all_gather_object(astuple(own))]

    def close(self) -> None:
        """Restore what SIGQUIT did before."""
        self.file.close()

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank of this host has ended; False for other hosts."""
        process = self.processes[rank]
        return process.host == socket.gethostname() and not StackFile.exists(process.pid, process.stack_file)

    def own(self, phase: str, step: int) -> RankStack:
        """Return the stack of this rank."""
        return own_stack(self.world.rank, phase, step)

    def answer(self, phase: str, step: int) -> None:
        """Answer a question if there is one, for this rank and for silent ones of its host."""
        if self.store.check([f"question/{self.number}"]):
            self._answer(phase, step)

    def _answer(self, phase: str, step: int) -> None:
        number, self.number = self.number, self.number + 1
        question = self.store.get(f"question/{number}").decode().split()[0]
        self._publish(number, self.own(phase, step))
        for process in self.processes:
            if process.host == self.processes[self.world.rank].host and process.rank != self.world.rank:
                last = self.heartbeat(process.rank)
                if last is not None and time.time() - last[0] > SILENT_SECONDS:
                    frames = frames_by_signal(process.pid, process.stack_file, wake=question == EXPLAIN)
                    if frames:
                        self._publish(number, RankStack(process.rank, process.host, last[1], last[2], frames))

    def ask(self, question: str, phase: str, step: int) -> list[RankStack] | None:
        """Return the stacks of all ranks, without frames for those that did not answer; None if another rank asks."""
        number = self.number
        key = f"question/{number}"
        if not self._is_first(key, question):
            self._answer(phase, step)
            return None
        self._answer(phase, step)
        deadline, found = time.monotonic() + COLLECT_SECONDS, dict[int, RankStack]()
        while len(found) < self.world.world_size and time.monotonic() < deadline:
            for rank in range(self.world.world_size):
                if rank not in found and self.store.check([f"answer/{number}/{rank}"]):
                    found[rank] = RankStack.of(json.loads(self.store.get(f"answer/{number}/{rank}")))
            time.sleep(0.05)
        return [found.get(rank) or self._unknown(rank) for rank in range(self.world.world_size)]

    def _is_first(self, key: str, question: str) -> bool:
        """Set `key`, and return whether no other rank has."""
        mine = f"{question} {self.world.rank}"
        return self.store.compare_set(key, "", mine).decode() == mine

    def _publish(self, number: int, stack: RankStack) -> None:
        values: tuple[Any, ...] = astuple(stack)
        self.store.set(f"answer/{number}/{stack.rank}", json.dumps(values))

    def _unknown(self, rank: int) -> RankStack:
        last = self.heartbeat(rank)
        phase, step = (last[1], last[2]) if last is not None else ("an unknown phase", 0)
        return RankStack(rank, self.processes[rank].host, phase, step, [])
