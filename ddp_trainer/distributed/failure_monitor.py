"""The failure monitor: the root cause of a failure is reported once, and no rank hangs or outlives its launcher.

Each rank publishes its status in a store with every heartbeat. The first rank to report a failure is the root cause,
and the others report nothing. A rank without heartbeats is reported by its neighbour. A rank that is killed cannot
report anything, so it writes its error file in advance, with every heartbeat; torchrun prints the file.
"""

import json
import os
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Self

import torch.distributed as dist

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.distributed.environment import Environment
from ddp_trainer.distributed.failure_report import (
    REPORTED,
    command_to_continue,
    error_lines,
    report,
    write_error_file,
)
from ddp_trainer.distributed.files import replace_text
from ddp_trainer.distributed.process_group import World
from ddp_trainer.registry import PluginError

HEARTBEAT_SECONDS = 1.0
MIN_SILENCE_SECONDS = 5 * HEARTBEAT_SECONDS
"""A shorter silence is no failure, because the thread may have to wait for the GIL or for a core."""
GRACE_SECONDS = 5.0
"""How long a rank that is not the root cause waits to be ended by the launcher."""
LOST_PEER = ("Connection closed by peer", "Connection reset", "Connection refused", "Broken pipe", "Timed out", "NCCL")
"""Parts of the message of a collective that fails because of another rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The content of a heartbeat: a rank's position in training, and its process."""

    rank: int
    heartbeat: int
    phase: str
    step: int
    host: str
    pid: int
    pid_namespace: str | None

    def line(self, failure: str) -> str:
        """Return one line of a report."""
        return f"rank {self.rank} on {self.host} {failure} {self.phase} after step {self.step}"

    def is_local(self) -> bool:
        """Return whether `pid` means the rank's process here too."""
        return self.pid_namespace is not None and self.pid_namespace == pid_namespace()

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended."""
        try:
            return self.is_local() and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True


def pid_namespace() -> str | None:
    """Return an identifier of the processes that share their pids; containers may share a host name without that."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


class FailureMonitor:
    """Monitors this rank, the next rank and the launcher inside the context. Collective: every rank must construct one.

    Set `phase` and `step` as training proceeds: the report of a failure contains them.
    """

    def __init__(
        self,
        world: World,
        environment: Environment,
        *,
        run_dir: Path,
        timeout_seconds: float,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.phase, self.step = "start", 0
        self._world, self._environment, self._run_dir = world, environment, run_dir
        self._stop_requested = stop_requested
        self._max_silence = max(timeout_seconds / 2, MIN_SILENCE_SECONDS)
        self._launcher, self._heartbeat = os.getppid(), 0
        self._is_root_cause, self._lock = False, threading.Lock()  # the lock is for the flag and the error file
        self._store = self._connect("failure_monitor/" + world.broadcast_object(uuid.uuid4().hex))
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="failure monitor", daemon=True)

    def _connect(self, prefix: str) -> dist.Store:
        if not self._environment.under_torchrun:
            return dist.HashStore()
        address, port = self._environment.master_addr, self._environment.master_port
        return dist.PrefixStore(prefix, dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10)))

    def __enter__(self) -> Self:
        self._publish()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ConfigError | TransientError | PluginError):
            if lines := self._root_cause(error):
                self._report(lines, since=time.time(), error=error)
            else:
                self._wait_for_launcher()
            error.add_note(REPORTED)
        self._done.set()
        self._thread.join()
        with suppress(dist.DistError):
            self._store.delete_key(f"status/{self._world.rank}")  # from here on silence is no failure
        self._remove_error_file()

    # --- the thread -----------------------------------------------------------------------------

    def _monitor(self) -> None:
        """Publish the status, and check the other ranks and the launcher, with every heartbeat."""
        last_status, silence, last_time = None, 0.0, time.monotonic()
        while not self._done.wait(HEARTBEAT_SECONDS):
            if self._environment.under_torchrun and os.getppid() != self._launcher:
                self._exit(1)  # torchrun was killed, and nothing else would end this process
            elapsed, last_time = time.monotonic() - last_time, time.monotonic()
            try:
                self._publish()
                if self._store.check(["root_cause"]) and not self._done.wait(GRACE_SECONDS):
                    self._exit(1)
                status = self._status((self._world.rank + 1) % self._world.world_size)
                # Limited, because this thread may have been stopped for longer, together with the other ranks.
                silence = silence + min(elapsed, 2 * HEARTBEAT_SECONDS) if status == last_status else 0.0
                last_status = status
                if status is not None and silence > self._max_silence:
                    self._end_job(status, silence)
            except dist.DistError:
                continue  # the store ends together with torchrun, for which the loop checks

    def _publish(self) -> None:
        self._heartbeat += 1
        status = self._own_status()
        self._store.set(f"status/{self._world.rank}", json.dumps(asdict(status)))
        text = self._text(
            [status.line("was lost, last seen in")], checkpoint=f"the newest in {self._run_dir / 'checkpoints'}"
        )
        with self._lock, suppress(OSError):  # a full disk must not end this thread
            if self._environment.error_file is not None and not self._is_root_cause:
                write_error_file(self._environment.error_file, text, since=time.time())

    def _own_status(self) -> RankStatus:
        return RankStatus(
            rank=self._world.rank, heartbeat=self._heartbeat, phase=self.phase, step=self.step,
            host=socket.gethostname(), pid=os.getpid(), pid_namespace=pid_namespace(),
        )  # fmt: skip

    def _status(self, rank: int) -> RankStatus | None:
        key = f"status/{rank}"
        return RankStatus(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _end_job(self, status: RankStatus, silence: float) -> NoReturn:
        """Report the rank of `status`, which has sent no heartbeat for `silence` seconds, and end this process."""
        lines = [status.line(f"has not answered for {silence:.0f} s, in")]
        if self._claim(lines):
            self._report(lines, since=time.time() - silence)
        if status.is_local():
            with suppress(OSError):  # the process may have ended
                os.kill(status.pid, signal.SIGCONT)  # if it is stopped: it then finds the root cause and ends
        self._exit(1)

    def _exit(self, code: int) -> NoReturn:
        """End this process from either thread, even if the other one is in a collective that never returns."""
        self._remove_error_file()
        os._exit(code)

    def _remove_error_file(self) -> None:
        """Remove the error file written in advance, because torchrun would print it for a rank that ended by itself."""
        with self._lock:
            if self._environment.error_file is not None and not self._is_root_cause:
                Path(self._environment.error_file).unlink(missing_ok=True)

    # --- the root cause -------------------------------------------------------------------------

    def _root_cause(self, error: Exception) -> list[str]:
        """Return the lines of this rank's report, or none if another rank or torchrun reports the root cause."""
        lines = [self._own_status().line("failed first, in"), *error_lines(error)]
        try:
            if any(part in str(error) for part in LOST_PEER):
                time.sleep(HEARTBEAT_SECONDS)  # the rank that is the root cause reports first
                others = [self._status(rank) for rank in range(self._world.world_size) if rank != self._world.rank]
                statuses = [status for status in others if status is not None]
                if self._store.check(["root_cause"]) or any(status.has_ended() for status in statuses):
                    return []  # torchrun prints the error file of a rank that was killed
                lost = self._without_heartbeat(statuses)
                lines = [status.line("was lost, last seen in") for status in lost] or lines
            return lines if self._claim(lines) else []
        except dist.DistError:
            return lines  # the store has ended, so that no other rank can be asked

    def _claim(self, lines: list[str]) -> bool:
        """Publish the first line as the root cause, unless there is one. Return whether it is the root cause."""
        return self._store.compare_set("root_cause", "", lines[0]) == lines[0].encode()

    def _without_heartbeat(self, statuses: list[RankStatus]) -> list[RankStatus]:
        """Return those of `statuses` that no heartbeat follows."""
        deadline = time.monotonic() + MIN_SILENCE_SECONDS
        while statuses and time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 4)
            statuses = [status for status in statuses if self._status(status.rank) == status]
        return statuses

    def _report(self, lines: list[str], *, since: float, error: Exception | None = None) -> None:
        with self._lock:
            self._is_root_cause = True  # from here on the error file stays
        if error is not None:
            path = self._run_dir / "failure.log"
            try:
                replace_text(path, "".join(traceback.format_exception(error)))
                lines = [*lines, f"traceback: {path}"]
            except OSError as unwritten:  # a full disk, for example
                lines = [*lines, f"the traceback was not kept: {unwritten}"]
        checkpoint = max((self._run_dir / "checkpoints").glob("step-*.pt"), default="none yet")
        report(self._text(lines, checkpoint=str(checkpoint)), self._environment, since=since)

    def _text(self, lines: list[str], *, checkpoint: str) -> str:
        command = command_to_continue(self._environment)
        return "\n".join([*lines, f"last good checkpoint: {checkpoint}", f"to continue: {command}"])

    def _wait_for_launcher(self) -> None:
        """Wait until the launcher ends this rank, as it does with all ranks after a failure: this is exit code 0."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._stop_requested():
                self._exit(0)
            time.sleep(0.1)
