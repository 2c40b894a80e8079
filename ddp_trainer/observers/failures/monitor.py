"""The failure monitor: the root cause of a failure is reported once, and no rank hangs or outlives
its launcher.

Each rank publishes its status in a store with every heartbeat. The first rank to report a failure
is the root cause, and the others report nothing. A rank without heartbeats is reported by its
neighbour. A rank that is killed cannot report anything, so it writes its error file in advance,
with every heartbeat; torchrun prints the file.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Self

import torch.distributed as dist

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.distributed.environment import Environment
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.process_group import World
from ddp_trainer.files import replace_text
from ddp_trainer.observers.failures.report import (
    REPORTED,
    command_to_continue,
    report,
    write_error_file,
)
from ddp_trainer.observers.failures.stack_exchange import PROCESSES, STACKS, StackExchange
from ddp_trainer.observers.failures.stacks import (
    ProgressClock,
    RankStatus,
    absent_ranks,
    grouped_lines,
    with_stack,
)
from ddp_trainer.registry import PluginError

HEARTBEAT_SECONDS = 1.0
MIN_SILENCE_SECONDS = 5 * HEARTBEAT_SECONDS
"""A shorter silence is no failure, because the thread may have to wait for the GIL or for a core.
"""
STILL_SHARE = 0.8
"""A rank that computes makes no progress if it has entered no phase for this share of
`timeout_seconds`.
"""
COMPILATION = "compilation"
END = "end"
"""The phases that may take any time: torch.compile waits for compilers, an ending run for files and
loggers.
"""
MAX_GROUPS = 12
"""The largest number of lines about the positions of ranks in a report on the console."""
GRACE_SECONDS = 5.0
"""How long a rank that is not the root cause waits to be ended by the launcher."""
WRITE_SECONDS = 2.0
"""How long `on_failure` may take."""
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out",
    "NCCL",
)
"""Parts of the message of a collective that fails because of another rank."""
LOST = "was lost (killed, perhaps by the kernel because memory was full), last seen in"


class FailureMonitor:
    """Monitors this rank, the next rank and the launcher inside the context. Collective: every rank
    must construct one.

    Set `phase` and `step` as training proceeds: the report of a failure contains them.
    """

    def __init__(
        self,
        world: World,
        environment: Environment,
        stop: GracefulStop,
        *,
        run_dir: Path,
        timeout_seconds: float,
    ) -> None:
        self._phase = "start"
        self.step = 0
        self.on_failure: Callable[[], None] = lambda: None
        """Called once on each rank before the job ends with a failure, from either thread, if the
        rank still can.
        """
        self._progress = ProgressClock(can_be_busy=world.device.type == "cpu")
        self._world = world
        self._environment = environment
        self._stop = stop
        self._run_dir = run_dir
        self._max_silence = max(timeout_seconds / 2, MIN_SILENCE_SECONDS)
        self._max_still = max(STILL_SHARE * timeout_seconds, self._max_silence)
        self._launcher = os.getppid()
        # the lock is for the flag and the error file
        self._is_root_cause = False
        self._lock = threading.Lock()
        prefix = "failure_monitor/" + world.broadcast_object(uuid.uuid4().hex)
        port = environment.master_port
        self._store: dist.Store = dist.HashStore()
        if environment.under_torchrun:
            store = dist.TCPStore(
                environment.master_addr, port, is_master=False, timeout=timedelta(seconds=10)
            )
            self._store = dist.PrefixStore(prefix, store)
        self._stacks = StackExchange(world, self._store, self._own_status, self._status)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="failure monitor", daemon=True)

    @property
    def phase(self) -> str:
        """The current phase of this rank; each assignment counts as progress."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self._progress.count += 1

    def __enter__(self) -> Self:
        if self._world.is_main:
            self._write(
                PROCESSES, json.dumps([asdict(process) for process in self._stacks.processes])
            )
        self._publish()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(
            error, ConfigError | TransientError | PluginError
        ):
            self._failing()
            if lines := self._root_cause(error):
                text = "".join(traceback.format_exception(error))
                self._report(lines, "traceback", "failure.log", text, since=time.time())
            # wait until the launcher ends this rank, as it does with all ranks after a failure
            else:
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline:
                    if self._stop.is_set:
                        self._exit(0)
                    time.sleep(0.1)
            error.add_note(REPORTED)
        self._done.set()
        self._thread.join()
        with suppress(dist.DistError):
            # from now on silence is no failure
            self._store.delete_key(f"status/{self._world.rank}")
        self._stacks.file.close()
        self._remove_error_file()

    def _monitor(self) -> None:
        """Publish the status, and check the other ranks and the launcher, with every heartbeat."""
        last_status = None
        silence = 0.0
        last_time = time.monotonic()
        while not self._done.wait(HEARTBEAT_SECONDS):
            if self._environment.under_torchrun and os.getppid() != self._launcher:
                self._exit(1)  # torchrun was killed, and nothing else would end this process
            elapsed = time.monotonic() - last_time
            last_time = time.monotonic()
            # Limited, because this thread may have been stopped for longer, together with the other
            # ranks.
            elapsed = min(elapsed, 2 * HEARTBEAT_SECONDS)
            self._progress.update(elapsed)
            try:
                self._publish()
                self._stacks.answer()
                if self._store.check(["root_cause"]):
                    self._failing()
                    if not self._done.wait(GRACE_SECONDS):
                        self._exit(1)
                status = self._status((self._world.rank + 1) % self._world.world_size)
                silence = silence + elapsed if status == last_status else 0.0
                last_status = status
                if status is not None and silence > self._max_silence:
                    self._end_job(f"has not answered for {silence:.0f} s", status.rank)
                if self._progress.idle_seconds > self._max_silence and self._is_hung():
                    self._end_job(f"has made no progress for {self._progress.idle_seconds:.0f} s")
                if self._stacks.file.has_grown():  # by SIGQUIT
                    self._show_stacks()
            except dist.DistError:
                # the store, in node 0's torchrun, has ended; the loop still checks this node's
                # torchrun
                continue

    def _publish(self) -> None:
        """Publish the status, and write the error file in advance, in case this rank is killed."""
        status = self._own_status()
        self._store.set(f"status/{self._world.rank}", json.dumps(astuple(status)))
        checkpoint = f"the newest in {self._run_dir / 'checkpoints'}"
        text = self._text([status.line(LOST)], checkpoint=checkpoint)
        with self._lock, suppress(OSError):  # a full disk must not end this thread
            if self._environment.error_file is not None and not self._is_root_cause:
                write_error_file(self._environment.error_file, text, since=time.time())

    def _own_status(self) -> RankStatus:
        idle = self._progress.idle_seconds
        still = self._progress.still_seconds
        return RankStatus(
            self._world.rank, socket.gethostname(), self.phase, self.step, time.time(), idle, still
        )

    def _status(self, rank: int) -> RankStatus | None:
        key = f"status/{rank}"
        return RankStatus(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _statuses_of_others(self) -> list[RankStatus]:
        """Return the status of each other rank, except ranks that sent none or have left their
        `FailureMonitor`.
        """
        others = [
            self._status(rank) for rank in range(self._world.world_size) if rank != self._world.rank
        ]
        return [status for status in others if status is not None]

    def _is_hung(self) -> bool:
        """Return whether the job hangs. Called when this rank has been idle (see `RankStatus`) for
        too long.

        The job hangs if this rank does not wait for other ranks, or if all other ranks make no
        progress either.
        """
        if self.phase in (COMPILATION, END):
            return False
        return not with_stack(self._own_status()).is_waiting or all(
            status.idle_seconds > self._max_silence / 2 or status.still_seconds > self._max_still
            for status in self._statuses_of_others()
        )

    def _end_job(self, failure: str, rank: int | None = None) -> NoReturn:
        """Report a hang, caused by `rank` or, if None, by the rank that the others wait for; end
        this process.
        """
        since = time.time() - self._max_silence
        self._failing()
        stacks = self._stacks.ask(wake=True)
        if stacks is None:  # another rank reports the hang, and the launcher then ends this rank
            self._done.wait(2 * GRACE_SECONDS)
            self._exit(1)
        absent = [stacks[rank]] if rank is not None else absent_ranks(stacks)
        all_wait = (
            f"all {len(stacks)} ranks wait for each other, and one {failure}: check the network"
        )
        first = absent[0].line(f"{failure}, in") if absent else all_wait
        lines = [first, *grouped_lines(stacks)[:MAX_GROUPS]]
        if self._claim(lines):
            text = "\n".join([*lines, "", *(stack.text() for stack in stacks)])
            self._report(lines, "stacks", "hang.log", text, since=since)
        self._exit(1)

    def _show_stacks(self) -> None:
        """Write the stacks of all ranks to stacks.log and to stderr."""
        stacks = self._stacks.ask(wake=False)
        if stacks is not None:
            groups = grouped_lines(stacks)
            texts = [stack.text() for stack in stacks]
            path = self._write(STACKS, "\n".join([*groups, "", *texts]))
            with suppress(OSError):  # stderr may be closed
                print(
                    *groups[:MAX_GROUPS],
                    "",
                    *texts,
                    f"stacks: {path}",
                    sep="\n",
                    file=sys.stderr,
                    flush=True,
                )

    def _write(self, name: str, text: str) -> str:
        """Write a file in the run directory. Return the path, or the reason why it was not
        written.
        """
        path = self._run_dir / name
        try:
            replace_text(path, text.rstrip() + "\n")
        except OSError as error:  # a full disk, for example
            return f"{path} could not be written ({error.strerror})"
        return str(path)

    def _failing(self) -> None:
        """Call `on_failure` if it was not called yet. Wait at most `WRITE_SECONDS`: a file system
        may not answer.
        """
        call = self.on_failure
        self.on_failure = lambda: None
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(WRITE_SECONDS)

    def _exit(self, code: int) -> NoReturn:
        """End this process from either thread, even if the other thread is in a collective that
        never returns.
        """
        self._remove_error_file()
        os._exit(code)

    def _remove_error_file(self) -> None:
        """Remove the error file that was written in case this rank is killed, unless it now reports
        the root cause.
        """
        with self._lock:
            if self._environment.error_file is not None and not self._is_root_cause:
                Path(self._environment.error_file).unlink(missing_ok=True)

    def _root_cause(self, error: Exception) -> list[str]:
        """Return the lines of this rank's report; [] if another rank reports the root cause."""
        lines = [
            self._own_status().line(getattr(error, "outcome", "failed first, in")),
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            *(
                f"at {f.filename}:{f.lineno} in {f.name}"
                for f in traceback.extract_tb(error.__traceback__)[-1:]
            ),
        ]
        try:
            if any(part in str(error) for part in LOST_PEER):
                lines = [status.line(LOST) for status in self._silent_ranks()] or lines
            return lines if self._claim(lines) else []
        except dist.DistError:
            return lines  # the store has ended, so that no other rank can be asked

    def _silent_ranks(self) -> list[RankStatus]:
        """Wait some seconds, or until there is a root cause; return the status of ranks without a
        new heartbeat.
        """
        was_stopping = self._stop.is_set
        deadline = time.monotonic() + MIN_SILENCE_SECONDS
        silent = self._statuses_of_others()
        while silent and time.monotonic() < deadline and not self._store.check(["root_cause"]):
            time.sleep(HEARTBEAT_SECONDS)
            if self._stop.is_set and not was_stopping:
                # torchrun ends this rank, and prints the error file of the killed rank
                self._exit(0)
            silent = [status for status in silent if self._status(status.rank) == status]
        processes = [self._stacks.processes[status.rank] for status in silent]
        have_ended = all(
            process.host == socket.gethostname() and not process.is_alive() for process in processes
        )
        if was_stopping and silent and have_ended:
            self._exit(0)  # the same, if torchrun stopped this rank before the collective failed
        return silent

    def _claim(self, lines: list[str]) -> bool:
        """Publish ``lines[0]`` as the root cause of the job. Return False if a root cause was
        published before.
        """
        # other ranks may have the same line: about a lost rank
        claim = f"rank {self._world.rank}: {lines[0]}"
        return self._store.compare_set("root_cause", "", claim).decode() == claim

    def _report(self, lines: list[str], title: str, name: str, text: str, *, since: float) -> None:
        """Write `text` to the run's file `name`; report `lines`, `title` and that path. since: as
        for `report`.
        """
        with self._lock:
            self._is_root_cause = True  # from here on the error file stays
        lines = [*lines, f"{title}: {self._write(name, text)}"]
        checkpoint = max((self._run_dir / "checkpoints").glob("step-*.pt"), default="none yet")
        report(self._text(lines, checkpoint=str(checkpoint)), self._environment, since=since)

    def _text(self, lines: list[str], *, checkpoint: str) -> str:
        command = command_to_continue(self._environment)
        return "\n".join([*lines, f"last good checkpoint: {checkpoint}", f"to continue: {command}"])
