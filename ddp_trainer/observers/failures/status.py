"""The status of ranks, the store in which they publish it, and the ranks that others wait for."""

import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from itertools import takewhile
from pathlib import Path

import torch.distributed as dist

from ddp_trainer.distributed.world import World, progress_count

BUSY_SHARE = 0.1
"""A thread counts as computing above this share of a core: a low share, as ranks may share cores.
"""
PACKAGE = f"{Path(__file__).parents[2]}/"
MAX_RANKS = 8
"""The largest number of ranks that a line of a report lists."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The position of a rank in training, published as a heartbeat; on request with its stack."""

    rank: int
    host: str
    phase: str
    step: int
    heartbeat: float = 0.0
    """The time of the heartbeat, in unix seconds; heartbeats of a rank have different times."""
    idle_seconds: float = 0.0
    """How many of the `still_seconds` the main thread did not compute (see `ProgressClock`)."""
    still_seconds: float = 0.0
    """How long ago the rank last made progress."""
    is_waiting: bool = False
    """Whether the rank waits for other ranks, as marked by `distributed.world`."""
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
    def place(self) -> str:
        """The innermost frame outside of Python's library and torch, else the innermost frame."""
        own = [frame for frame in self.frames if not is_library(frame)]
        return [*own, *self.frames, "an unknown place"][0]

    @property
    def collective(self) -> str:
        """The function of torch.distributed in which code of a user waits; "" if there is none."""
        inner = list(takewhile(is_library, self.frames))
        calls = [frame for frame in inner if "/torch/distributed/distributed_c10d.py" in frame]
        is_own = self.place.startswith(PACKAGE)
        return calls[-1].rpartition(" ")[2] if calls and not is_own else ""

    def to_json(self) -> str:
        """Return the values of all fields as a JSON list."""
        return json.dumps(astuple(self))

    def text(self) -> str:
        """Return the whole stack, the innermost frame first."""
        title = f"rank {self.rank} on {self.host}, in {self.phase} after step {self.step}:"
        lines = [f"  {frame}" for frame in self.frames or ["unknown"]]
        if self.collectives:
            lines.append(f"  last collectives: {', '.join(self.collectives)}")
        return "\n".join([title, *lines])


def is_library(frame: str) -> bool:
    """Return whether `frame` (``file:line in function``) is in Python's library or in torch."""
    is_installed = "/site-packages/" in frame or "/dist-packages/" in frame
    is_python = frame.startswith(("<", os.path.dirname(os.__file__) + "/")) and not is_installed
    return is_python or "/torch/" in frame


class ProgressClock:
    """Measures how long the main thread made no progress (still) and did not compute either (idle).

    The failure monitor's thread calls `update`. Progress is what `record_progress` has recorded.
    can_be_busy: whether CPU time is a sign of computing. On a GPU it is not, because a thread that
    waits for a GPU uses CPU time too: all still seconds are idle there.
    """

    def __init__(self, *, can_be_busy: bool) -> None:
        self.idle_seconds = 0.0
        self.still_seconds = 0.0
        self._can_be_busy = can_be_busy
        self._cpu_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._cpu_seconds = 0.0
        self._last_count = progress_count()

    def update(self, elapsed: float) -> None:
        """Record whether there was progress in the last `elapsed` seconds."""
        cpu_seconds = time.clock_gettime(self._cpu_clock)
        is_busy = cpu_seconds - self._cpu_seconds >= BUSY_SHARE * elapsed
        self._cpu_seconds = cpu_seconds
        count = progress_count()
        if count != self._last_count:
            self._last_count = count
            self.still_seconds = 0.0
            self.idle_seconds = 0.0
            return
        self.still_seconds += elapsed
        if not (is_busy and self._can_be_busy):
            self.idle_seconds += elapsed


class StatusBoard:
    """The last heartbeat of each rank and the root cause of a failure, in a store of all ranks.

    Collective: every rank must construct one.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # random, because the former runs of a sweep have used the same store
        prefix = f"failure_monitor/{world.broadcast_object(uuid.uuid4().hex)}"
        # a second connection, for the monitor's thread; torch has no public name for the store
        store = dist.distributed_c10d._get_default_store().clone()
        store.set_timeout(timedelta(seconds=10))
        self.store = dist.PrefixStore(prefix, store)
        self.has_claimed = False

    def publish(self, status: RankStatus) -> None:
        """Publish the heartbeat of this rank, with or without its stack."""
        self.store.set(f"status/{status.rank}", status.to_json())

    def publish_frames(self, status: RankStatus, frames: list[str]) -> None:
        """Add `frames` to another rank's heartbeat `status`, unless there is a newer heartbeat."""
        with_frames = replace(status, frames=frames).to_json()
        self.store.compare_set(f"status/{status.rank}", status.to_json(), with_frames)

    def leave(self) -> None:
        """Remove the heartbeat of this rank: from now on its silence is no failure."""
        with suppress(dist.DistError):
            self.store.delete_key(f"status/{self.world.rank}")

    def status(self, rank: int) -> RankStatus | None:
        """Return the last heartbeat of `rank`; None before its first, and after `leave`."""
        key = f"status/{rank}"
        return RankStatus(*json.loads(self.store.get(key))) if self.store.check([key]) else None

    def others(self) -> list[RankStatus]:
        """Return the last heartbeat of each other rank that has one."""
        ranks = (rank for rank in range(self.world.world_size) if rank != self.world.rank)
        return [status for status in map(self.status, ranks) if status is not None]

    def has_root_cause(self) -> bool:
        """Return whether a rank has claimed to report the root cause of a failure."""
        return self.store.check(["root_cause"])

    def claim_root_cause(self) -> bool:
        """Claim to report the root cause; return whether this rank is the first that claims it."""
        rank = str(self.world.rank)
        self.has_claimed = True
        return self.store.compare_set("root_cause", "", rank).decode() == rank

    def is_forged(self) -> bool:
        """Return whether another program, and no rank, has claimed to report the root cause."""
        claimed_by = self.store.get("root_cause").decode()
        is_own = claimed_by == str(self.world.rank)
        ranks = map(str, range(self.world.world_size))
        return (is_own and not self.has_claimed) or claimed_by not in ranks


def absent_ranks(stacks: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that the others wait for; [] if several ranks all wait for each other.

    Candidates are the ranks that do not wait, or all ranks if all wait; of these, the ranks at the
    lowest step; of these, the ranks whose place in the code has the fewest ranks.
    """
    places = Counter((stack.phase, stack.place) for stack in stacks)
    order = [(stack.is_waiting, stack.step, places[stack.phase, stack.place]) for stack in stacks]
    first = min(order)
    absent = [stack for stack, position in zip(stacks, order, strict=True) if position == first]
    return [] if len(absent) == len(stacks) > 1 and stacks[0].is_waiting else absent


def mismatch(stacks: Sequence[RankStatus]) -> str | None:
    """Return a line about collectives of a user that only some ranks call; None without one."""
    calls = [(stack.collective, stack.place) for stack in stacks]
    callers = [stack for stack in stacks if stack.collective]
    if not callers or len(set(calls)) == 1:
        return None
    first = callers[0]
    others = [
        stack.rank for stack, call in zip(stacks, calls, strict=True) if call[0] != first.collective
    ]
    missing = f"{list_ranks(others)} {'do' if len(others) > 1 else 'does'} not call it"
    if not others:
        missing = "other ranks call it elsewhere"
    return (
        f"rank {first.rank} on {first.host} waits in {first.collective}, called at {first.place},"
        f" and {missing}: all ranks must make the same calls of torch.distributed, in the same"
        " order"
    )


def grouped_lines(stacks: Sequence[RankStatus]) -> list[str]:
    """Return a line for each position of ranks; the ranks that the others wait for come first."""
    absent = {stack.rank for stack in absent_ranks(stacks)}
    groups: dict[str, list[int]] = {}
    for stack in sorted(stacks, key=lambda stack: (stack.rank not in absent, stack.rank)):
        position = f"{stack.phase} after step {stack.step}, at {stack.place}"
        groups.setdefault(position, []).append(stack.rank)
    return [f"{list_ranks(ranks)}: {position}" for position, ranks in groups.items()]


def stacks_text(stacks: Sequence[RankStatus]) -> str:
    """Return the `grouped_lines` and the stacks of all ranks."""
    return "\n".join([*grouped_lines(stacks), "", *(stack.text() for stack in stacks)])


def list_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0, 2``, or the first `MAX_RANKS` and how many more there are."""
    text = ", ".join(map(str, ranks[:MAX_RANKS]))
    if len(ranks) > MAX_RANKS:
        text += f" and {len(ranks) - MAX_RANKS} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
