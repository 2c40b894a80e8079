"""The process group: joining and leaving it."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_trainer.config.errors import ConfigError, TransientError, one_line, require
from ddp_trainer.config.schema import Backend, Device
from ddp_trainer.cores import usable_cores
from ddp_trainer.distributed.environment import (
    Environment,
    check_interface,
    set_interface,
)
from ddp_trainer.distributed.membership import Membership, Round
from ddp_trainer.distributed.rendezvous import announce_busy, join_round
from ddp_trainer.distributed.world import World

T = TypeVar("T")

FORMING_TIMEOUT = timedelta(seconds=10)
"""Time limit for the connections of a new round."""
MAX_UNFORMED = 10
"""How many groups in a row may fail before they are complete, because members were lost."""

# torch 2.14 has a public name
_set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


class _Own:
    """The process group of the package's own collectives, which all jobs of a sweep share."""

    group: Any = None


@contextmanager
def process_group(
    environment: Environment,
    *,
    device: Device,
    backend: Backend,
    num_threads: int | str,
    timeout_seconds: int,
    membership: Membership | None = None,
) -> Iterator[World]:
    """Join the process group, yield this rank's `World`, and leave the group. Collective.

    If this process is already in a group, as in a sweep, the context uses that group and does not
    leave it. The caller must delete every reference to a DDP module before the context ends.
    membership: chooses the ranks of the group; None: they are all ranks that torchrun started.

    Raises:
        ConfigError: this machine lacks the device, the backend or the interface that is chosen in
            GLOO_SOCKET_IFNAME, or the group has another backend.
        TransientError: no group of `membership` could be formed.
        TimeoutError: ranks did not join within `timeout_seconds`; the message names them.
    """
    torch_device, chosen = choose_device(device, backend, environment)
    if isinstance(num_threads, str):  # auto
        num_threads = max(1, usable_cores() // environment.local_world_size)
    torch.set_num_threads(num_threads)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)

    was_initialized = dist.is_initialized()
    timeout = timedelta(seconds=timeout_seconds)
    members = None
    if membership is not None:
        members = _join_members(membership, torch_device, chosen, timeout)
    elif not was_initialized:
        _join(environment, torch_device, chosen, timeout)
        _Own.group = dist.new_group(backend=chosen, timeout=timeout)
    require(
        dist.get_backend() == chosen,
        f"backend={chosen} differs from the first job's, but a sweep shares one process group:"
        " use one backend",
    )

    yield World(
        rank=members.slots.index(environment.rank) if members else environment.rank,
        world_size=len(members.slots) if members else environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        device=torch_device,
        backend=chosen,
        num_threads=num_threads,
        group=_Own.group,
    )

    # Not after an exception, because other ranks may be gone and the traceback keeps DDP modules
    # alive.
    if not was_initialized:
        shutdown()


def choose_device(
    device: Device, backend: Backend, environment: Environment
) -> tuple[torch.device, str]:
    """Return the torch device and the name of the backend.

    Raises ConfigError if GPUs are needed, and this machine has none or fewer than local ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # a driver may be too old
    ranks = environment.local_world_size
    require(
        backend is not Backend.nccl or gpus > 0,
        "backend=nccl needs a GPU and none is visible: use backend=gloo, or backend=auto",
    )
    if device is Device.cpu or (device is Device.auto and gpus == 0):
        return torch.device("cpu"), "gloo"
    require(gpus > 0, "device=cuda needs a GPU and none is visible: use device=cpu, or device=auto")
    require(
        ranks <= gpus,
        f"{ranks} ranks on this node need a GPU each and {gpus} are visible: use"
        f" --nproc_per_node={gpus}, or device=cpu",
    )
    name = "gloo" if backend is Backend.gloo else "nccl"
    return torch.device("cuda", environment.local_rank), name


def _join(environment: Environment, device: torch.device, backend: str, timeout: timedelta) -> None:
    rank = environment.rank
    world_size = environment.world_size
    store: dist.Store = dist.HashStore()
    check_interface()
    if environment.under_torchrun:
        set_interface(environment)
        environment.record_start()
        store = next(dist.rendezvous("env://", timeout=timeout))[0]
        store = join_round(store, rank=rank, world_size=world_size, timeout=timeout)
    is_bound = backend == "nccl" and environment.under_torchrun
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if is_bound else None,
    )


def _join_members(
    membership: Membership, device: torch.device, backend: str, timeout: timedelta
) -> Round:
    """Join the process group of the next round.

    Raises:
        TransientError: no group could be formed, though members are left.
    """
    reason = ""
    for _ in range(MAX_UNFORMED):
        members, store = membership.next_round()
        try:
            with membership.connections.opened_inside():
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=members.slots.index(membership.slot),
                    world_size=len(members.slots),
                    timeout=FORMING_TIMEOUT,
                    device_id=device if backend == "nccl" else None,
                )
                _Own.group = dist.new_group(backend=backend, timeout=FORMING_TIMEOUT)
        except RuntimeError as error:  # a member was lost before the group was complete
            reason = one_line(error)
            membership.leave_round()
            shutdown()
            continue
        for group in (None, _Own.group):
            _set_timeout(timeout, group)
        return members
    raise membership.fail(
        f"the ranks could not connect to each other {MAX_UNFORMED} times in a row ({reason}): check"
        " the network, and the ranks that end again and again"
    )


def prepare(attempt: Callable[[], T], environment: Environment) -> Callable[[World], T]:
    """Call ``attempt()`` before joining; return a function that gives the result after joining.

    All ranks must call this function with the group's `World`. It returns the result of
    ``attempt()``, or raises on all ranks the ConfigError or TransientError that ``attempt()`` has
    raised on any rank.
    """
    outcome: Future[T] = Future()
    with announce_busy(environment):
        try:
            outcome.set_result(attempt())
        except (ConfigError, TransientError) as error:
            outcome.set_exception(error)
    return lambda world: world.raise_on_any_rank(outcome.result)


def shutdown() -> None:
    """Leave the process group, if any.

    The caller must have deleted all DDP modules: a remaining one may abort Python at exit.
    """
    gc.collect()  # DDP modules are in reference cycles
    if dist.is_initialized():
        dist.destroy_process_group()
        _Own.group = None
