"""Collects the stacks of all ranks of a job on one rank: for the report of a hang, and on
demand.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import torch.distributed as dist

from ddp_trainer.config.errors import ConfigError, require, require_run_dir
from ddp_trainer.distributed.process_group import World
from ddp_trainer.observers.failures.stacks import RankProcess, RankStatus, StackFile, with_stack

PROCESSES = "processes.json"
STACKS = "stacks.log"
ANSWER_SECONDS = 15.0
"""How long ``doctor RUN_DIR`` waits for the ranks."""
COLLECT_SECONDS = 3.5
"""How long the asking rank waits for answers. Other ranks look for a question with every heartbeat.
"""
SILENT_SECONDS = 3.0
"""A process of this host that has sent no heartbeat for this long is asked by a signal."""


def read_processes(run_dir: Path) -> list[RankProcess]:
    """Return the processes of the running or last job in `run_dir`; [] if there was none."""
    try:
        return [RankProcess(**values) for values in json.loads((run_dir / PROCESSES).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def stacks_of(run_dir: Path) -> str:
    """Return the stacks of the ranks that train in `run_dir` now; ConfigError if no rank on this
    host answers.
    """
    require_run_dir(run_dir)
    processes = read_processes(run_dir)
    hosts = {process.host for process in processes}
    require(
        not hosts or socket.gethostname() in hosts,
        f"no rank of {run_dir} runs on this host: run doctor on one of {', '.join(hosts)}",
    )
    alive = next((process for process in processes if process.is_alive()), None)
    if alive is None:
        raise ConfigError(f"no job of this user is running in {run_dir} on this host")
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


class StackExchange:
    """Lets a rank ask all ranks for their status and stack. Collective: every rank must construct
    one.

    To ask, a rank sets a key in `store`; the first rank that sets it collects the answers. own: a
    function that returns the status of this rank. last: a function that returns the last heartbeat
    of a rank (the status that it publishes every second), or None if it has published none.
    """

    def __init__(
        self,
        world: World,
        store: dist.Store,
        own: Callable[[], RankStatus],
        last: Callable[[int], RankStatus | None],
    ) -> None:
        self.world = world
        self.store = store
        self.own = own
        self.last = last
        self.file = StackFile()
        self.number = 0
        process = RankProcess(
            world.rank, socket.gethostname(), os.getpid(), self.file.file.fileno()
        )
        self.processes = [
            RankProcess(*values) for values in world.all_gather_object(astuple(process))
        ]

    def answer(self) -> None:
        """If a rank asks, publish the status of this rank, and of ranks on this host that send no
        heartbeats.
        """
        if not self.store.check([f"question/{self.number}"]):
            return
        number = self.number
        self.number = self.number + 1
        wake = self.store.get(f"question/{number}").startswith(b"wake")
        self._publish(number, with_stack(self.own()))
        for process in self.processes:
            status = (
                self.last(process.rank)
                if process.rank != self.world.rank and process.is_alive()
                else None
            )
            if (
                status
                and time.time() - status.heartbeat > SILENT_SECONDS
                and (frames := process.frames(wake=wake))
            ):
                self._publish(number, replace(status, frames=frames))

    def ask(self, *, wake: bool) -> list[RankStatus] | None:
        """Ask all ranks, and return their status and stack by rank; None if another rank asked
        first and gets them.

        The status of a rank that does not answer is its last heartbeat, without a stack. wake:
        whether to continue stopped processes (SIGCONT) so that they answer, which is right only if
        the job is about to be ended.
        """
        number = self.number
        question = f"{'wake' if wake else 'show'} {self.world.rank}"
        is_first = self.store.compare_set(f"question/{number}", "", question).decode() == question
        self.answer()
        if not is_first:
            return None
        deadline = time.monotonic() + COLLECT_SECONDS
        found = dict[int, RankStatus]()
        while len(found) < self.world.world_size and time.monotonic() < deadline:
            for rank in range(self.world.world_size):
                if rank not in found and self.store.check([f"answer/{number}/{rank}"]):
                    found[rank] = RankStatus(*json.loads(self.store.get(f"answer/{number}/{rank}")))
            time.sleep(0.05)
        return [
            found.get(process.rank)
            or self.last(process.rank)
            or RankStatus(process.rank, process.host, "an unknown phase", step=0)
            for process in self.processes
        ]

    def _publish(self, number: int, status: RankStatus) -> None:
        self.store.set(f"answer/{number}/{status.rank}", json.dumps(astuple(status)))
