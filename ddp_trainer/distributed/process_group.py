"""The process group: joining and leaving it."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_trainer.config.errors import ConfigError, TransientError, require
from ddp_trainer.config.schema import Backend, Device
from ddp_trainer.distributed.environment import Environment, set_interface, usable_cores
from ddp_trainer.distributed.rendezvous import announce_busy, join_round
from ddp_trainer.distributed.world import World

T = TypeVar("T")


@contextmanager
def process_group(
    environment: Environment,
    *,
    device: Device,
    backend: Backend,
    num_threads: int | str,
    timeout_seconds: int,
) -> Iterator[World]:
    """Join the process group, yield this rank's `World`, and leave the group. Collective.

    A process joins at most once: the later jobs of a sweep use the group of the first. Every
    reference to a DDP module must be gone at the end of the context.

    Raises ConfigError if this machine lacks the device or the backend; TimeoutError, which names
    the ranks that did not join within `timeout_seconds`.
    """
    torch_device, chosen = choose_device(device, backend, environment)
    if isinstance(num_threads, str):  # auto
        num_threads = max(1, usable_cores() // environment.local_world_size)
    torch.set_num_threads(num_threads)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)

    was_initialized = dist.is_initialized()
    if not was_initialized:
        _join(environment, torch_device, chosen, timedelta(seconds=timeout_seconds))
    require(
        dist.get_backend() == chosen,
        f"backend={chosen} differs from the first job's, but a sweep shares one process group:"
        " use one backend",
    )

    yield World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        device=torch_device,
        backend=chosen,
        num_threads=num_threads,
    )

    # Not after an exception, because other ranks may be gone and the traceback keeps DDP modules
    # alive.
    if not was_initialized:
        shutdown()


def choose_device(
    device: Device, backend: Backend, environment: Environment
) -> tuple[torch.device, str]:
    """Return the torch device and the name of the backend.

    Raises ConfigError if this machine lacks one of them.
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


def prepare(attempt: Callable[[], T], environment: Environment) -> Callable[[World], T]:
    """Call ``attempt()`` before joining; return a function that returns the result after joining.

    All ranks must call that function with the group's `World`. It returns the result, or raises on
    all ranks the ConfigError or TransientError that ``attempt()`` has raised on one of them.
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

    The caller must have deleted all DDP modules: one may abort Python at exit.
    """
    gc.collect()  # DDP modules are in reference cycles
    if dist.is_initialized():
        dist.destroy_process_group()
