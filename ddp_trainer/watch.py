"""Who failed first, and does everybody still answer: one cause told once, and no rank that hangs or is orphaned.

Each rank publishes where it is in a store that all can reach. When ranks fail, the first to say so is the cause
and the others keep quiet; when one stops answering, its neighbour says so; when the launcher is gone, ranks go.
A rank that is killed can say nothing: it leaves a will where torchrun looks for the cause, renewed every second.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from ddp_trainer.config import ConfigError
from ddp_trainer.distributed import World
from ddp_trainer.environment import Environment
from ddp_trainer.files import replace_text

BEAT_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""How long a rank that is not the cause waits to be ended by the launcher."""
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Timed out",
    "NCCL",
)
"""What a collective says when another rank is the one in trouble."""


TOLD = "told by Watch"


def is_told(error: Exception) -> bool:
    """Say whether a `Watch` has told of `error`, or knows that another rank tells the cause."""
    return TOLD in getattr(error, "__notes__", ())


def tell_unwatched(error: Exception, environment: Environment) -> None:
    """Tell of an `error` from before the watch began, with its traceback."""
    tell("".join(traceback.format_exception(error)), environment, since=time.time())


def tell(block: str, environment: Environment, *, since: float) -> None:
    """Hand `block` to torchrun, which prints it last, or print it to stderr."""
    if environment.error_file is None:
        print(block, file=sys.stderr, flush=True)
        return
    replace_text(Path(environment.error_file), error_file_text(block, since=since))


def error_file_text(block: str, *, since: float) -> str:
    """Return `block` in the form in which torchrun expects the cause of a failure at `since` (unix seconds)."""
    extra = {"py_callstack": block, "timestamp": str(int(since))}
    return json.dumps({"message": {"message": block.splitlines()[0], "extraInfo": extra}})


class Watch:
    """Keeps watch over this rank and its neighbour while the context lasts.

    Set `phase` and `step` as training proceeds; what is told of a failure names them.
    """

    def __init__(
        self,
        world: World,
        environment: Environment,
        *,
        run_dir: Path,
        timeout_seconds: float,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world, self.environment, self.run_dir = world, environment, run_dir
        self.told_to_stop = told_to_stop
        self.silence_seconds = timeout_seconds / 2
        self.phase, self.step = "start", 0
        self._parent, self._done = os.getppid(), threading.Event()
        self._will, self._has_told = Path(f"{environment.error_file}.will"), False
        self._prefix = "watch/" + world.broadcast(uuid.uuid4().hex)
        self._store = self._connect()
        self._thread = threading.Thread(target=self._beat, name="watch", daemon=True)

    def _connect(self) -> dist.Store:
        if not self.environment.under_torchrun:
            return dist.HashStore()
        address, port = self.environment.master_addr, self.environment.master_port
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))

    def __enter__(self) -> Self:
        self._publish(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            self._fail(error)
            error.add_note(TOLD)
        self._done.set()
        self._thread.join()
        self._drop_will()

    # --- the thread -----------------------------------------------------------------------------

    def _beat(self) -> None:
        """Publish, look for a failure elsewhere, look after the neighbour and the launcher, once a second."""
        neighbour = (self.world.rank + 1) % self.world.world_size
        heard, when, beats = None, time.monotonic(), 0
        while not self._done.wait(BEAT_SECONDS):
            if self.environment.under_torchrun and os.getppid() != self._parent:
                self._drop_will()
                os._exit(1)  # torchrun was killed: nobody is left to end this process
            try:
                beats += 1
                self._publish(beats)
                if self._cause() is not None:
                    self._leave()
                said = self._place(neighbour)
            except dist.DistError:
                continue  # the store is going away with the job; the parent check above ends this
            if said != heard:
                heard, when = said, time.monotonic()
            elif heard is not None and time.monotonic() - when > self.silence_seconds:
                self._report_silence(neighbour, json.loads(heard), time.monotonic() - when)

    def _leave(self) -> None:
        """End this process some seconds after another rank failed, should the launcher not do it."""
        if not self._done.wait(GRACE_SECONDS):
            self._drop_will()
            os._exit(1)

    def _publish(self, beats: int) -> None:
        place = {
            "beats": beats, "phase": self.phase, "step": self.step, "pid": os.getpid(), "host": socket.gethostname()
        }  # fmt: skip
        self._store.set(f"{self._prefix}/place/{self.world.rank}", json.dumps(place))
        if self.environment.error_file is not None:
            lost = f"rank {self.world.rank} on {place['host']} was lost, last seen in {where(place)}"
            will = self._block(lost, good=f"the newest in {self.run_dir / 'checkpoints'}")
            with suppress(OSError):  # a full disk must not end the watch
                self._will.write_text(error_file_text(will, since=time.time()))
                self._will.replace(self.environment.error_file)

    def _drop_will(self) -> None:
        """Leave nothing for torchrun to print of a rank that has come to its own end, unless it has told the cause."""
        if self.environment.error_file is not None and not self._has_told:
            Path(self.environment.error_file).unlink(missing_ok=True)

    def _place(self, rank: int) -> str | None:
        key = f"{self._prefix}/place/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _report_silence(self, rank: int, place: dict[str, Any], seconds: float) -> None:
        what = f"rank {rank} on {place['host']} has not answered for {seconds:.0f} s, in {where(place)}"
        if self._claim(what):
            self._tell(what, since=time.time() - seconds)
        if place["host"] == socket.gethostname():
            os.kill(place["pid"], signal.SIGCONT)  # if it is stopped, let it see that the job is over
        self._drop_will()
        os._exit(1)

    # --- telling --------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Tell of `error` if this rank is the first to fail; otherwise wait to be ended by the launcher."""
        lost: list[str] = []
        if any(sign in str(error) for sign in LOST_PEER):
            self._done.wait(BEAT_SECONDS)  # leave the one in trouble time to speak
            if self._cause() is None and self._died_here():
                self._wait_to_be_ended()  # torchrun has seen it die and prints its will
                return
            lost = self._silent_ranks() if self._cause() is None else []
        here = where({"phase": self.phase, "step": self.step})
        lines = lost or [f"rank {self.world.rank} on {socket.gethostname()} failed first, in {here}", *summed_up(error)]
        if not self._claim(lines[0]):
            self._wait_to_be_ended()
            return
        kept = self.run_dir / "failure.log"
        try:
            replace_text(kept, "".join(traceback.format_exception(error)))
            lines.append(f"traceback: {kept}")
        except OSError as unwritten:  # a full disk, say: the cause is told all the same
            lines.append(f"the traceback was not kept: {unwritten}")
        self._tell(*lines)

    def _wait_to_be_ended(self) -> None:
        """Wait for the launcher, which saw the cause fail; ended by it, this rank is no failure of its own."""
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self.told_to_stop():
                os._exit(0)
            time.sleep(0.1)

    def _claim(self, what: str) -> bool:
        """Say `what` failed. Return whether this was the first failure of the job."""
        try:
            return self._store.compare_set(f"{self._prefix}/cause", "", what) == what.encode()
        except dist.DistError:
            return True  # nobody else can be asked

    def _cause(self) -> str | None:
        key = f"{self._prefix}/cause"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _places(self) -> dict[int, str]:
        """Return what the other ranks have last published, by rank."""
        others = [rank for rank in range(self.world.world_size) if rank != self.world.rank]
        return {rank: said for rank in others if (said := self._place(rank))}

    def _died_here(self) -> bool:
        """Say whether a rank on this host, under this torchrun, has ended."""
        return any(is_dead(json.loads(said)) for said in self._places().values())

    def _silent_ranks(self) -> list[str]:
        """Name the ranks that no longer publish."""
        before = self._places()
        time.sleep(2 * BEAT_SECONDS)
        silent = {rank: json.loads(said) for rank, said in before.items() if self._place(rank) == said}
        return [
            f"rank {rank} on {place['host']} was lost, last seen in {where(place)}" for rank, place in silent.items()
        ]

    def _tell(self, *lines: str, since: float | None = None) -> None:
        """Say what happened and how to go on: to torchrun, which prints it last, or to stderr."""
        self._has_told = True
        good = max((self.run_dir / "checkpoints").glob("step-*.pt"), default="none yet")
        tell(self._block(*lines, good=str(good)), self.environment, since=since or time.time())

    def _block(self, *lines: str, good: str) -> str:
        """Return `lines` followed by what is left and how to go on."""
        return "\n".join([*lines, f"last good checkpoint: {good}", f"to go on: {self.command()}"])

    def command(self) -> str:
        """Return the command line that goes on with this run."""
        if self.environment.command is not None:
            return self.environment.command
        started = getattr(sys.modules["__main__"], "__spec__", None)  # as python -m knows it
        module = "ddp_trainer.job" if started is not None and started.name == "ddp_trainer.job" else "ddp_trainer"
        arguments = shlex.join(["-m", module, *sys.argv[1:]])
        if not self.environment.under_torchrun:
            return f"python {arguments}"
        nodes = self.environment.world_size // self.environment.local_world_size
        across = f" --nnodes={nodes} …" if nodes > 1 else ""
        return f"torchrun{across} --nproc_per_node={self.environment.local_world_size} {arguments}"


def summed_up(error: Exception) -> list[str]:
    """Return what `error` is and where it was raised, a line each."""
    lines = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    if frames := traceback.extract_tb(error.__traceback__):
        lines.append(f"at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
    return lines


def is_dead(place: dict[str, Any]) -> bool:
    """Say whether the process at `place` is on this host and has ended."""
    if place["host"] != socket.gethostname():
        return False
    try:
        return Path(f"/proc/{place['pid']}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def where(place: dict[str, Any]) -> str:
    """Return a rank's place in words."""
    return f"{place['phase']} after step {place['step']}"
