"""Which processes take part in a training while some are lost and others come: `Membership`.

torchrun starts a process for each *slot*, and starts it again when it has ended. The processes
decide by themselves, in torchrun's store, which of them form the next process group: a *round*. It
ends when a member is lost, and at a control point when another process asks to join.
"""

import hashlib
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from ddp_trainer.config.errors import TransientError, require
from ddp_trainer.distributed.world import RoundEndedError

BEAT_SECONDS = 0.2
POLL_SECONDS = 0.01
FORMING_SECONDS = 1.0
"""A process that is silent for so long is left out of a new round; it can join later."""
FINISHED = "finished"
PREFIX = "recovery"
"""The beginning of the keys in torchrun's store."""


class TooFewRanksError(Exception):
    """Fewer ranks than recovery.min_ranks are left."""


class JobEndedError(Exception):
    """The job has finished without this process, which came too late."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that takes part, as it writes itself to the store with every beat."""

    slot: int
    nonce: str
    host: str
    pid: int
    start_time: str
    """When the process began, by the clock of its kernel, because ids of processes are reused."""
    beat: int = 0
    is_waiting: bool = False
    """Whether the process waits for a new round."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; False also if it runs on another host."""
        return self.host == socket.gethostname() and start_time_of(self.pid) != self.start_time

    def kill(self) -> None:
        """End the process if it runs on this host, and is a rank of this job."""
        if self.host != socket.gethostname() or start_time_of(self.pid) != self.start_time:
            return
        # because another program may have written an entry with the id of any process
        with suppress(OSError):
            own, other = (environment_of(pid) for pid in ("self", self.pid))
            is_rank = f"RANK={self.slot}".encode() in other
            if is_rank and all(word in other for word in own if word.startswith(b"MASTER_")):
                os.kill(self.pid, signal.SIGKILL)

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Return the entry in `text`; None if another program has written it."""
        try:
            entry = cls(*json.loads(text))
        except (TypeError, ValueError):
            return None
        types = [type(value) for value in astuple(entry)]
        return entry if types == [int, str, str, int, str, int, bool] else None


@dataclass(frozen=True, slots=True)
class Round:
    """The members of a process group: the slot and the nonce of each, by rank."""

    number: int
    slots: list[int]
    nonces: list[str]


def ended_key(host: str, pid: int) -> str:
    """Return the key in torchrun's store that the agent of an ended process sets."""
    return f"{PREFIX}/ended/{host}/{pid}"


def environment_of(pid: int | str) -> set[bytes]:
    """Return the variables of a process of this host, as ``NAME=value``."""
    return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def start_time_of(pid: int) -> str:
    """Return when the process `pid` of this host began; "" if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


class Connections:
    """The sockets of a process group, which another thread can shut down.

    gloo cannot abort: a collective whose peer is silent would wait for its timeout. If its sockets
    are shut down, it fails at once, on both sides.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, str] = {}

    @staticmethod
    def open_now() -> dict[int, str]:
        """Return the sockets of this process: the names of their inodes by file descriptor."""
        names = {}
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # the descriptor of the folder itself
                names[fd] = os.readlink(f"/proc/self/fd/{fd}")
        return {fd: name for fd, name in names.items() if name.startswith("socket:")}

    @contextmanager
    def opened_inside(self) -> Iterator[None]:
        """Take the sockets that are opened inside the context as those of the group."""
        before = self.open_now()
        try:
            yield
        finally:
            after = self.open_now()
            self._sockets = {fd: name for fd, name in after.items() if before.get(fd) != name}

    def shut_down(self) -> None:
        """Shut down the sockets that are still open."""
        for fd, name in self._sockets.items():
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == name:  # else it was closed, and reused
                    with socket.socket(fileno=os.dup(fd)) as connection:
                        connection.getpeername()  # fails for a listening socket: gloo would abort
                        connection.shutdown(socket.SHUT_RDWR)
        self._sockets = {}


class Membership:
    """This process's part in the rounds. A context manager, whose thread sends heartbeats."""

    def __init__(
        self,
        store: dist.Store,
        *,
        slot: int,
        num_slots: int,
        min_ranks: int,
        join_seconds: float,
        silent_seconds: float,
    ) -> None:
        """store: torchrun's store."""
        self.slot = slot
        self.num_slots = num_slots
        self.min_ranks = min_ranks
        self.join_seconds = join_seconds
        self.silent_seconds = silent_seconds
        self.connections = Connections()
        self.is_broken = False
        """Whether the current round has ended because a member was lost."""
        self.lost: list[Process] = []
        """The members of the last round that were lost."""
        self.round: Round | None = None
        """The last round of which this process was a member."""
        pid = os.getpid()
        self._own = Process(slot, uuid.uuid4().hex, socket.gethostname(), pid, start_time_of(pid))
        self._in_round = False
        self._store = dist.PrefixStore(PREFIX, store)
        clone = store.clone()
        clone.set_timeout(timedelta(seconds=10))
        self._store_of_thread = dist.PrefixStore(PREFIX, clone)
        self._seen: dict[int, tuple[Process, float]] = {}
        """The last known entry of each slot, and when it has last changed."""
        self._ended: set[str] = set()
        """The nonces of processes of which their agent has said that they have ended."""
        self._lock = threading.Lock()
        self.job = self._store.compare_set("job_id", "", uuid.uuid4().hex).decode()
        """A random name of the job."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, name="membership", daemon=True)

    def __enter__(self) -> Self:
        self._beat(self._store)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    # --- rounds, in the main thread ---------------------------------------------------------------

    def next_round(self) -> tuple[Round, dist.Store]:
        """Wait for the next round with this process; return it and a store for its group.

        Raises:
            JobEndedError: the job has finished.
            TransientError: the job has failed.
            TooFewRanksError: fewer ranks than `min_ranks` are left, and no others came.
        """
        self._beat(self._store, is_waiting=True)
        deadline = time.monotonic() + self.join_seconds
        while True:
            self._check_job()
            current = self._current_round()
            if current is not None and self._is_new(current):
                self.round = current
                if self._all_enter(current):
                    break
                continue
            self._look(self._store)
            candidates = self._candidates()
            is_late = time.monotonic() > deadline
            has_enough = len(candidates) >= self.min_ranks
            if self._is_awaited(current):
                deadline = time.monotonic() + self.join_seconds
            elif has_enough and (current or is_late or len(candidates) == self.num_slots):
                if candidates[0].nonce == self._own.nonce:
                    self._publish(candidates, current)
            elif is_late:
                raise TooFewRanksError(
                    f"{len(candidates)} of at least {self.min_ranks} ranks (recovery.min_ranks) are"
                    f" left, and no others came within {self.join_seconds:g} s"
                    " (recovery.join_seconds)"
                )
            time.sleep(POLL_SECONDS)
        self.lost = []
        self.is_broken = False
        self._in_round = True
        self._beat(self._store, is_waiting=False)
        return current, dist.PrefixStore(f"round/{current.number}", self._store)

    def check_same(self, *values: Any) -> None:
        """Check that `values`, JSON values, are those of the other processes of the job.

        Raises:
            ConfigError: they differ; this process must not join the others.
        """
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        require(
            self._store.compare_set("values", "", digest).decode() == digest,
            "this rank was started with other versions, settings or data than the ranks that"
            " train: use the same on all nodes",
        )

    def members(self) -> dict[str, list[str]]:
        """Return the nonce and the host of each member of the round, by its slot."""
        assert self.round is not None
        return {
            str(slot): [nonce, self._seen[slot][0].host]
            for slot, nonce in zip(self.round.slots, self.round.nonces, strict=True)
        }

    def check(self) -> None:
        """Raise RoundEndedError if a member was lost."""
        if self.is_broken:
            raise RoundEndedError

    def leave_round(self) -> None:
        """End this process's part in the round; the other members notice it."""
        self._in_round = False
        self.connections.shut_down()

    @property
    def number(self) -> int:
        """The number of the round, from 1."""
        return self.round.number if self.round else 0

    @property
    def has_candidates(self) -> bool:
        """Whether a process waits to join the round."""
        members = self.round.nonces if self.round else []
        return any(entry.nonce not in members for entry in self._candidates())

    def fail(self, reason: str) -> TransientError:
        """Record that the job has failed, for processes that ask to join; return the error."""
        with suppress(dist.DistError):
            self._store.compare_set("job", "", reason)
        return TransientError(reason)

    def finish(self) -> None:
        """Record that the job has finished."""
        with suppress(dist.DistError):
            self._store.compare_set("job", "", FINISHED)

    def remove(self, rank: int) -> None:
        """End the member `rank` of the round, because it makes no progress."""
        assert self.round is not None
        self._store_of_thread.set(f"remove/{self.round.nonces[rank]}", "")

    def _check_job(self) -> None:
        if not self._store.check(["job"]):
            return
        state = self._store.get("job").decode()
        if state == FINISHED:
            raise JobEndedError
        raise TransientError(f"the job has failed: {state}")

    def _current_round(self) -> Round | None:
        if not self._store.check(["round"]):
            return None
        try:
            return Round(*json.loads(self._store.get("round")))
        except (TypeError, ValueError):
            raise TransientError(
                "another program has written to the MASTER_PORT of this job: use a network that no"
                " other program can reach (docs/security.md)"
            ) from None

    def _is_new(self, current: Round) -> bool:
        is_later = self.round is None or current.number > self.round.number
        return is_later and self._own.nonce in current.nonces

    def _candidates(self) -> list[Process]:
        """Return the processes that wait for a round, by slot."""
        entries = [entry for _, (entry, _) in sorted(self._seen.items())]
        return [e for e in entries if e.is_waiting and not self._is_lost(e, FORMING_SECONDS)]

    def _is_awaited(self, current: Round | None) -> bool:
        """Return whether the next round must wait for a process that is not yet a candidate.

        current: the last round, whose members must leave it or be lost; None: there was no round
        yet, and processes still start.
        """
        return any(
            (current is None or entry.nonce in current.nonces)
            and not entry.is_waiting
            and not self._is_lost(entry, FORMING_SECONDS)
            for entry, _ in list(self._seen.values())  # the other thread adds processes
        )

    def _publish(self, members: Sequence[Process], former: Round | None) -> None:
        """Begin a round, unless another process has begun one after `former`."""
        number = former.number + 1 if former else 1
        new = Round(number, [entry.slot for entry in members], [entry.nonce for entry in members])
        before = json.dumps(astuple(former)) if former else ""
        self._store.compare_set("round", before, json.dumps(astuple(new)))

    def _all_enter(self, current: Round) -> bool:
        """Wait for the members of `current`; return False if one is lost before all are there."""
        keys = [f"entered/{current.number}/{slot}" for slot in current.slots]
        self._store.set(keys[current.slots.index(self._own.slot)], "")
        while not self._store.check(keys):
            self._look(self._store)
            if self._store.check([f"broken/{current.number}"]) or self._find_lost(FORMING_SECONDS):
                self._store.set(f"broken/{current.number}", "")
                return False
            time.sleep(POLL_SECONDS)
        return True

    # --- heartbeats -------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            # The store is in the torchrun process of node 0; without it, no round can be formed.
            with suppress(dist.DistError):
                self._beat(self._store_of_thread)
                self._look(self._store_of_thread)
                if self._store_of_thread.check([f"remove/{self._own.nonce}"]):
                    os.kill(os.getpid(), signal.SIGKILL)
                if self._in_round and not self.is_broken:
                    self._watch()

    def _watch(self) -> None:
        """End the round if another member has ended it, or if a member is lost."""
        assert self.round is not None
        key = f"broken/{self.round.number}"
        self.lost = self._find_lost(self.silent_seconds)
        if self.lost:
            self._store_of_thread.set(key, "")
            for entry in self.lost:
                if entry.nonce in self.round.nonces:  # not the process that replaces a lost one
                    entry.kill()  # so that a stopped process releases the lock of the run directory
        if self.lost or self._store_of_thread.check([key]):
            self.is_broken = True
            self.connections.shut_down()

    def _find_lost(self, seconds: float) -> list[Process]:
        """Return the members of the round that have ended, or are silent for so many seconds."""
        members = zip(self.round.slots, self.round.nonces, strict=True) if self.round else ()
        entries = [(nonce, self._seen[slot][0]) for slot, nonce in members if slot in self._seen]
        return [
            entry
            for nonce, entry in entries
            if entry.nonce != nonce or self._is_lost(entry, seconds)
        ]

    def _is_lost(self, entry: Process, seconds: float) -> bool:
        changed = self._seen[entry.slot][1]
        has_ended = entry.has_ended or entry.nonce in self._ended
        return has_ended or time.monotonic() - changed > seconds

    def _beat(self, store: dist.Store, *, is_waiting: bool | None = None) -> None:
        """Write the entry of this process to the store."""
        with self._lock:
            waits = self._own.is_waiting if is_waiting is None else is_waiting
            self._own = replace(self._own, beat=self._own.beat + 1, is_waiting=waits)
            store.set(f"member/{self._own.slot}", json.dumps(astuple(self._own)))

    def _look(self, store: dist.Store) -> None:
        """Read the entries of all slots."""
        for slot in range(self.num_slots):
            key = f"member/{slot}"
            if slot in self._seen or store.check([key]):
                entry = Process.parse(store.get(key))
                if entry is None or entry.slot != slot:
                    continue
                if slot not in self._seen or entry != self._seen[slot][0]:
                    self._seen[slot] = entry, time.monotonic()
                key = ended_key(entry.host, entry.pid).removeprefix(f"{PREFIX}/")
                if entry.nonce not in self._ended and store.check([key]):
                    self._ended.add(entry.nonce)
