"""Collects the stacks of all ranks on one rank: for the report of a hang, and on demand."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ddp_trainer.config.errors import ConfigError, require, require_run_dir
from ddp_trainer.observers.failures.stacks import RankProcess, StackFile, with_stack
from ddp_trainer.observers.failures.status import RankStatus, StatusBoard

PROCESSES = "processes.json"
STACKS = "stacks.log"
ANSWER_SECONDS = 15.0
"""How long ``doctor RUN_DIR`` waits for the ranks."""
COLLECT_SECONDS = 3.5
"""How long the asking rank waits; other ranks look for a question with every heartbeat."""
SILENT_SECONDS = 3.0
"""A process of this host that has sent no heartbeat for this long is asked by a signal."""


def read_processes(run_dir: Path) -> list[RankProcess]:
    """Return the processes of the running or last job in `run_dir`; [] if there was none."""
    try:
        return [RankProcess(**values) for values in json.loads((run_dir / PROCESSES).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def stacks_of(run_dir: Path) -> str:
    """Return the stacks of the ranks that train in `run_dir` now.

    Raises ConfigError if no rank on this host answers.
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
