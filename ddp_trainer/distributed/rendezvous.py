"""The rendezvous of ranks in torchrun's store, after their start and after each restart."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from ddp_trainer.distributed.environment import Environment

BUSY = "busy"
"""A counter in the store. A rank that prepares data adds 1 regularly, so that others wait on."""
BUSY_SECONDS = 2.0
POLL_SECONDS = 0.02


@contextmanager
def announce_busy(environment: Environment) -> Iterator[None]:
    """Restart the timeout of other ranks in `join_round` every `BUSY_SECONDS` inside the context.

    This does nothing if rank 0 runs the store, because rank 0's store may not exist yet.
    """
    is_alone = environment.world_size == 1 or dist.is_initialized()
    if is_alone or not environment.has_agent_store:
        yield
        return
    done = threading.Event()

    def announce() -> None:
        store: dist.Store | None = None
        while not done.wait(BUSY_SECONDS):
            # An error means that the other ranks have given up; torchrun then ends this rank.
            with suppress(RuntimeError, ValueError):
                store = store or next(dist.rendezvous("env://"))[0]
                store.add(BUSY, 1)

    thread = threading.Thread(target=announce, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(BUSY_SECONDS)


def join_round(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a view of `store` for the ranks of the latest (re)start only. Collective.

    When torchrun restarts the ranks, its store still has the addresses of processes that have
    ended. gloo would connect to these addresses, and fail or wait forever. So each process writes a
    random nonce to the store, which replaces the nonce of its rank's former process. Rank 0
    publishes a round: a random name, and all nonces in the store, of which some may still be those
    of former processes. A process joins the round only if the round has its own nonce. The keys of
    the returned view begin with the name of the round.

    Raises TimeoutError, which names the missing ranks.
    """
    nonce = uuid.uuid4().hex
    own_name = uuid.uuid4().hex
    arrived = [f"arrived/{r}" for r in range(world_size)]
    # Rank 0 counts as missing until it publishes a round with this nonce.
    joined = ["", *arrived[1:]]
    store.set(arrived[rank], nonce)
    for _ in _polls(store, timeout):
        if rank == 0:
            nonces = [store.get(key).decode() for key in arrived if store.check([key])]
            store.set("round", json.dumps([own_name, *nonces]))
        name = _accepted_name(store, nonce)
        if name is None:
            continue
        joined = [f"{name}/joined/{r}" for r in range(world_size)]
        store.set(joined[rank], "")
        # only rank 0 checks the keys of all ranks, because there may be thousands
        if rank == 0 and store.check(joined):
            store.set(f"{name}/complete", "")
        if store.check([f"{name}/complete"]):
            return dist.PrefixStore(name, store)
    missing = [str(r) for r, key in enumerate(joined) if not store.check([key])]
    raise TimeoutError(
        f"{world_size - len(missing)} of {world_size} ranks came within"
        f" {timeout.total_seconds():.0f} s, missing: {', '.join(missing)}"
    )


def _accepted_name(store: dist.Store, nonce: str) -> str | None:
    """Return the name of the round that rank 0 has published; None if no round has `nonce`."""
    if not store.check(["round"]):
        return None
    name, *nonces = json.loads(store.get("round"))
    return name if nonce in nonces else None


def _polls(store: dist.Store, timeout: timedelta) -> Iterator[None]:
    """Yield every `POLL_SECONDS`, until `timeout` has passed since `BUSY` last changed."""
    num_busy = None
    deadline = 0.0
    while True:
        last = num_busy
        num_busy = store.add(BUSY, 0)
        if num_busy != last:
            deadline = time.monotonic() + timeout.total_seconds()
        if time.monotonic() >= deadline:
            return
        yield
        time.sleep(POLL_SECONDS)
