"""The failure monitor: one report of the root cause, and no rank that hangs or is left alone.

Each rank publishes its status in a store with every heartbeat. The first reported failure is the
root cause, and the other ranks report nothing. Each rank checks the heartbeats of the next rank,
and reports that rank if they stop. A rank that is killed cannot report anything, so it writes its
error file in advance, with every heartbeat; torchrun prints the file.

If one of two ranks is killed, the other one's next collective fails, or its monitor misses the
heartbeats. torchrun sends it SIGTERM, which only sets the flag of the graceful stop: the rank ends
when its collective has failed. It reports nothing and saves no new checkpoint, but it finishes a
checkpoint that is being written. If its collective does not fail, its monitor or torchrun ends it.
torchrun then prints the error file of the killed rank. The next launch resumes from the newest
checkpoint, so that the steps since then are repeated.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Self

import torch.distributed as dist

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.distributed.environment import Environment
from ddp_trainer.distributed.graceful_stop import GracefulStop
from ddp_trainer.distributed.world import (
    RoundEndedError,
    World,
    is_waiting,
    progress_count,
    record_progress,
)
from ddp_trainer.observers.failures.report import REPORTED, Reporter, error_lines
from ddp_trainer.observers.failures.stacks import PROCESSES, STACKS, StackExchange, with_stack
from ddp_trainer.observers.failures.status import (
    ProgressClock,
    RankStatus,
    StatusBoard,
    absent_ranks,
    grouped_lines,
    mismatch,
    stacks_text,
)
from ddp_trainer.registry import PluginError
from ddp_trainer.training.phase import MAY_TAKE_ANY_TIME, Phase
from ddp_trainer.training.run import Observer

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
MIN_SILENCE_SECONDS = 5 * HEARTBEAT_SECONDS
"""A shorter silence is no failure, because the thread may have to wait for the GIL or for a core.
"""
STILL_SHARE = 0.8
"""A computing rank counts as stuck after this share of `timeout_seconds` without progress."""
MAX_GROUPS = 12
"""The largest number of lines about the positions of ranks in a report on the console."""
GRACE_SECONDS = 5.0
"""How long a rank that is not the root cause waits for the launcher's SIGTERM.

After SIGTERM it exits with 0. Without SIGTERM, the monitor's thread ends it with exit status 1.
"""
SAVE_SECONDS = 25.0
"""How long such a rank may go on to write a checkpoint; torchrun kills it after 30 s."""
EMIT_SECONDS = 2.0
"""How long `emit_failure` may take, because a file system may not answer."""
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out",
    "NCCL",
)
"""Texts in the error message of a collective that fails because another rank was lost."""
FORGED = (
    "the store of the ranks says that the job has failed, and no rank has said so: another program"
    " has written to the MASTER_PORT of this job (see docs/security.md)"
)
LOST = (
    "was lost (killed, perhaps by the kernel because memory was full, or aborted by a library: see"
    " the output above), last seen in"
)


class FailureMonitor(Observer):
    """Monitors this rank, the next rank and the launcher inside the context.

    Collective: every rank must construct one.
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
        self.phase = Phase.start
        self.step = 0
        self.remove_rank: Callable[[int], None] | None = None
        """Ends a rank without which the training goes on; None: it cannot go on."""
        self.is_saving: Callable[[], bool] = lambda: False
        """Returns whether this rank writes a checkpoint now."""
        self.emit_failure: Callable[[], None] = lambda: None
        """Called once on each rank that is still able to, before the job ends with a failure.

        The call comes from another thread than the main thread.
        """
        self._world = world
        self._stop = stop
        self._max_silence = max(timeout_seconds / 2, MIN_SILENCE_SECONDS)
        self._max_still = max(STILL_SHARE * timeout_seconds, self._max_silence)
        self._launcher = os.getppid() if environment.under_torchrun else None
        self._progress = ProgressClock(can_be_busy=world.device.type == "cpu")
        self._last_heartbeat = 0.0
        """The last heartbeat of the next rank, which has been silent for `_silence_seconds`."""
        self._silence_seconds = 0.0
        self._reporter = Reporter(run_dir, environment)
        self._board = StatusBoard(world)
        self._stacks = StackExchange(self._board, self._own_status)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._monitor, name="failure monitor", daemon=True)

    def on_start(self, run: Any) -> None:
        self.step = run.step  # after a resume, not 0

    def on_phase(self, run: Any, phase: Phase) -> None:
        self.phase = phase
        record_progress()

    def on_step(self, run: Any) -> None:
        self.step = run.step

    def has_root_cause(self) -> bool:
        """Return whether a rank has reported an error that ends the job."""
        try:
            return self._board.has_root_cause()
        except dist.DistError:
            return True  # the store has ended, and with it the job

    def __enter__(self) -> Self:
        if self._world.is_main:
            processes = [asdict(process) for process in self._stacks.processes]
            self._reporter.write(PROCESSES, json.dumps(processes))
        self._publish()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_user_error = isinstance(
            error, ConfigError | TransientError | PluginError | RoundEndedError
        )
        is_root_cause = False
        if isinstance(error, Exception) and not is_user_error:
            is_root_cause = self._fail(error)
            error.add_note(REPORTED)
        self._stop_thread()
        self._board.leave()
        self._stacks.file.close()
        if not is_root_cause:
            self._reporter.withdraw()

    # --- the thread -------------------------------------------------------------------------------

    def _monitor(self) -> None:
        last_time = time.monotonic()
        while not self._done.wait(HEARTBEAT_SECONDS):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._exit(1)  # torchrun was killed, and nothing else would end this process
            now = time.monotonic()
            # Limited, because this thread may have been stopped for longer, together with the other
            # ranks.
            elapsed = min(now - last_time, 2 * HEARTBEAT_SECONDS)
            last_time = now
            self._progress.update(elapsed)
            # The store is in the torchrun process of node 0. When that process has ended, this loop
            # still checks the torchrun process of its own node.
            with suppress(dist.DistError):
                self._beat(elapsed)

    def _beat(self, elapsed: float) -> None:
        """Publish this rank's status, and check everything that may end the job.

        elapsed: the seconds since the last call.
        """
        self._publish()
        # Read before `answer`: a rank that reports a hang asks for the stacks before it claims the
        # root cause, so a rank that sees the root cause here also answers.
        has_root_cause = self._board.has_root_cause()
        self._stacks.answer()
        if has_root_cause:
            self._emit_failure()
            if not self._leave():
                if self._board.is_forged():
                    self._reporter.report([FORGED], title="the same", name="hang.log", text=FORGED)
                    os._exit(1)
                self._exit(1)
            return
        if self.remove_rank is None:
            self._check_neighbour(elapsed)
        if self._is_hung():
            failure = f"has made no progress for {self._progress.idle_seconds:.0f} s"
            if self.remove_rank is None or not self._remove_hung(failure, self.remove_rank):
                self._end_job(failure)
        if self._stacks.file.has_grown():  # by SIGQUIT
            self._show_stacks()

    def _leave(self) -> bool:
        """Wait for the end of the main thread; return False if it does not end in time.

        It gets `GRACE_SECONDS`, and while a checkpoint is written, up to `SAVE_SECONDS`.
        """
        deadline = time.monotonic() + SAVE_SECONDS
        count = -1
        while not self._done.wait(GRACE_SECONDS):
            if count == progress_count() or not self.is_saving() or time.monotonic() > deadline:
                return False
            count = progress_count()
        return True

    def _check_neighbour(self, elapsed: float) -> None:
        """End the job if the next rank sends no heartbeats any more."""
        neighbour = self._board.status((self._world.rank + 1) % self._world.world_size)
        if neighbour is None:  # the next rank has left its monitor
            return
        if neighbour.heartbeat != self._last_heartbeat:
            self._last_heartbeat = neighbour.heartbeat
            self._silence_seconds = 0.0
            return
        self._silence_seconds += elapsed
        if self._silence_seconds > self._max_silence:
            self._end_job(f"has not answered for {self._silence_seconds:.0f} s", neighbour.rank)

    def _publish(self) -> None:
        status = self._own_status()
        self._board.publish(status)
        self._reporter.write_in_advance(status.line(LOST))

    def _own_status(self) -> RankStatus:
        return RankStatus(
            rank=self._world.rank,
            host=socket.gethostname(),
            phase=self.phase.text,
            step=self.step,
            heartbeat=time.time(),
            idle_seconds=self._progress.idle_seconds,
            still_seconds=self._progress.still_seconds,
            is_waiting=is_waiting(),
        )

    def _is_hung(self) -> bool:
        """Return whether this rank has been idle (see `RankStatus`) for too long in a hung job.

        The job hangs if this rank does not wait for other ranks, or if all other ranks make no
        progress either.
        """
        if self._progress.idle_seconds <= self._max_silence or self.phase in MAY_TAKE_ANY_TIME:
            return False
        is_own_collective = with_stack(self._own_status()).collective != ""
        return not (is_waiting() or is_own_collective) or all(
            status.idle_seconds > self._max_silence / 2 or status.still_seconds > self._max_still
            for status in self._board.others()
        )

    def _remove_hung(self, failure: str, remove_rank: Callable[[int], None]) -> bool:
        """Report and remove the ranks that the others wait for; return False if there are none."""
        self._stacks.ask(wake=True)
        stacks = self._stacks.collect()
        absent = absent_ranks(stacks)
        if not absent or mismatch(stacks):
            return False
        path = self._reporter.write("hang.log", stacks_text(stacks))
        for status in absent:
            logger.warning("%s: it is removed; stacks: %s", status.line(f"{failure}, in"), path)
            remove_rank(status.rank)
        return True

    def _end_job(self, failure: str, rank: int | None = None) -> NoReturn:
        """Report a hang and end this process.

        rank: the rank that has caused the hang; None: report the ranks that the others wait for.
        """
        since = time.time() - self._max_silence
        self._emit_failure()
        self._stacks.ask(wake=True)
        if not self._board.claim_root_cause():  # the launcher ends this rank after the report
            self._done.wait(2 * GRACE_SECONDS)
            self._exit(1)
        stacks = self._stacks.collect()
        absent = [stacks[rank]] if rank is not None else absent_ranks(stacks)
        all_ranks = f"all {len(stacks)} ranks wait for each other"
        first = f"{all_ranks}, and one {failure}: check the network"
        if absent:
            first = absent[0].line(f"{failure}, in")
        first = mismatch(stacks) or first
        self._reporter.report(
            [first, *grouped_lines(stacks)[:MAX_GROUPS]],
            title="stacks",
            name="hang.log",
            text=f"{first}\n{stacks_text(stacks)}",
            since=since,
        )
        os._exit(1)

    def _show_stacks(self) -> None:
        """Write the stacks of all ranks to stacks.log and to stderr."""
        self._stacks.ask(wake=False)
        text = stacks_text(self._stacks.collect())
        path = self._reporter.write(STACKS, text)
        with suppress(OSError):  # stderr may be closed
            print(f"{text}\nstacks: {path}", file=sys.stderr, flush=True)

    # --- both threads -----------------------------------------------------------------------------

    def _emit_failure(self) -> None:
        """Call `emit_failure`, unless it was called before, and wait at most `EMIT_SECONDS`."""
        call = self.emit_failure
        self.emit_failure = lambda: None
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(EMIT_SECONDS)

    def _exit(self, code: int) -> NoReturn:
        """End this process without a report, even if the main thread is stuck in a collective."""
        self._reporter.withdraw()
        os._exit(code)

    # --- the main thread --------------------------------------------------------------------------

    def _stop_thread(self) -> None:
        self._done.set()
        self._thread.join()

    def _fail(self, error: Exception) -> bool:
        """Report `error` if it is the root cause, else wait until the launcher ends this rank.

        Returns whether it is the root cause.
        """
        self._emit_failure()
        outcome = getattr(error, "outcome", "failed first, in")
        lines = [self._own_status().line(outcome), *error_lines(error)]
        since = time.time()
        try:
            if silent := self._lost_ranks(error):
                lines = [self._loss(status) for status in silent]
                # earlier than the error files that these ranks wrote in advance
                since = min(status.heartbeat for status in silent) - HEARTBEAT_SECONDS
            # asked before this rank claims it, too
            is_forged = self._board.has_root_cause() and self._board.is_forged()
            lines = [FORGED] if is_forged else lines
            is_root_cause = self._board.claim_root_cause() or is_forged
        except dist.DistError:  # the store has ended: no other rank can be asked
            is_root_cause = True
        if is_root_cause:
            self._stop_thread()  # because that thread writes the error file too
            text = "".join(traceback.format_exception(error))
            self._reporter.report(
                lines,
                title="traceback",
                name="failure.log",
                text=text,
                since=since,
                is_repeatable=getattr(error, "is_repeatable", False),
            )
        else:
            self._wait_for_stop()
        return is_root_cause

    def _wait_for_stop(self) -> None:
        """Exit at the launcher's SIGTERM; return if there is none within `GRACE_SECONDS`."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._stop.is_set:
                self._exit(0)
            time.sleep(0.1)

    def _lost_ranks(self, error: Exception) -> list[RankStatus]:
        """Return the last heartbeats of the ranks that send none for `MIN_SILENCE_SECONDS`.

        Returns [] if `error` is not that of a collective. The wait ends early if no rank is silent,
        or if there is a root cause.

        If torchrun stops this rank because of lost ranks, this ends the process without a report:
        torchrun prints the error files of the lost ranks.
        """
        if not any(part in str(error) for part in LOST_PEER):
            return []
        was_stopping = self._stop.is_set
        deadline = time.monotonic() + MIN_SILENCE_SECONDS
        silent = self._board.others()
        while silent and time.monotonic() < deadline and not self._board.has_root_cause():
            time.sleep(HEARTBEAT_SECONDS)
            if self._stop.is_set and not was_stopping:
                self._exit(0)
            silent = [status for status in silent if self._board.status(status.rank) == status]
            # If torchrun had stopped this rank before the collective failed, this rank ends only
            # when the processes of all silent ranks have ended.
            if was_stopping and silent and all(map(self._has_ended, silent)):
                self._exit(0)
        return silent

    def _loss(self, status: RankStatus) -> str:
        """Return the line of a silent rank: a process that is alive on this host was not killed."""
        is_alive = self._stacks.processes[status.rank].is_alive()
        silence = f"has not answered for {MIN_SILENCE_SECONDS:.0f} s, in"
        return status.line(silence if is_alive else LOST)

    def _has_ended(self, status: RankStatus) -> bool:
        process = self._stacks.processes[status.rank]
        return process.is_here and not process.is_alive()
