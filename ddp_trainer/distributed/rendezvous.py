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
"""A counter in the store. A rank that prepares data adds 1 to it, so that the others wait on."""
BUSY_SECONDS = 2.0
POLL_SECONDS = 0.02


@contextmanager
def announce_busy(environment: Environment) -> Iterator[None]:
    """Restart the timeout of other ranks in `join_round` every `BUSY_SECONDS` inside the context.

    Only possible if a torchrun process, not rank 0, runs the store.
    """
    is_alone = environment.world_size == 1 or dist.is_initialized()
    if is_alone or not environment.has_agent_store:
        yield
        return
    done = threading.Event()

    def announce() -> None:
        store: dist.Store | None = None
        while not done.wait(BUSY_SECONDS):
            # the others have given up, and torchrun ends this rank
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

    torchrun keeps its store when it restarts the ranks, and with it the addresses of processes that
    have ended: gloo would connect to those, and fail or wait forever. So each process writes a
    random nonce to the store, in place of the nonce of its rank's former process. Rank 0 publishes
    a name for the start with the nonces in the store, of which some may still be those of former
    processes. A process accepts the name only if its own nonce is among them.

    Raises TimeoutError, which names the missing ranks.
    """
    nonce = uuid.uuid4().hex
    own_name = uuid.uuid4().hex
    arrived = [f"arrived/{r}" for r in range(world_size)]
    joined = ["", *arrived[1:]]  # until rank 0 publishes a name with this nonce: rank 0 is missing
    store.set(arrived[rank], nonce)
    for _ in _polls(store, timeout):
        if rank == 0:
            _publish_name(store, own_name, arrived)
        name = _accepted_name(store, nonce)
        if name is None:
            continue
        joined = [f"{name}/joined/{r}" for r in range(world_size)]
        store.set(joined[rank], "")
        # other ranks ask for one key only: there may be thousands
        if rank == 0 and store.check(joined):
            store.set(f"{name}/complete", "")
        if store.check([f"{name}/complete"]):
            return dist.PrefixStore(name, store)
    missing = [str(r) for r, key in enumerate(joined) if not store.check([key])]
    raise TimeoutError(
        f"{world_size - len(missing)} of {world_size} ranks came within"
        f" {timeout.total_seconds():.0f} s, missing: {', '.join(missing)}"
    )


def _publish_name(store: dist.Store, name: str, arrived: list[str]) -> None:
    nonces = [store.get(key).decode() for key in arrived if store.check([key])]
    store.set("round", json.dumps([name, *nonces]))


def _accepted_name(store: dist.Store, nonce: str) -> str | None:
    """Return the name of the start that rank 0 has published, None if it does not have `nonce`."""
    if not store.check(["round"]):
        return None
    name, *nonces = json.loads(store.get("round"))
    return name if nonce in nonces else None


def _polls(store: dist.Store, timeout: timedelta) -> Iterator[None]:
    """Yield every `POLL_SECONDS`, until `timeout` has passed since a rank was busy last."""
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
