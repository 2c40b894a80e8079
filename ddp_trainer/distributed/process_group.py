"""The process group: joining, leaving, and the collectives of `World`."""

import gc
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, TransientError, require
from ddp_trainer.config.schema import Backend, Device
from ddp_trainer.distributed.environment import Environment, set_interface, usable_cores

T = TypeVar("T")

BUSY = "busy"
BUSY_SECONDS = 2.0
"""A key of the store, and how often (in seconds) a rank adds 1 to it while preparing data, so that
others wait on.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This rank, the size of its process group, and the group's collectives."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    num_threads: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the rank that writes files."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum of `tensor` over ranks, in place. Collective: every rank must
        call this.
        """
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's `tensor` (of one shape), by rank. Collective: every rank must call
        this.
        """
        if self.world_size == 1 or not tensor.numel():
            return [tensor] * self.world_size
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor)
        return tensors

    def all_gather_object(self, value: T) -> list[T]:
        """Return every rank's `value` (a JSON value), by rank. Collective: every rank must call
        this.
        """
        if self.world_size == 1:
            return [value]
        text = json.dumps(value).encode()
        longest = int(max(self.all_gather(torch.tensor([len(text)], device=self.device))))
        padded = self._to_tensor(text.ljust(longest))  # JSON ignores spaces at its end
        return [json.loads(tensor.cpu().numpy().tobytes()) for tensor in self.all_gather(padded)]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` (a JSON value). Collective: every rank must call this."""
        return self.all_gather_object(value)[0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's `tensor`, maybe in place; it must be contiguous. Collective: every rank
        must call this.
        """
        if self.world_size > 1 and tensor.numel():
            sent = tensor.to(self.device)
            dist.broadcast(sent, src=0)
            return tensor if self.is_main else sent.to(tensor.device)
        return tensor

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's `data`, of any length. Collective: every rank must call this."""
        if (length := self.broadcast_object(len(data))) == 0:
            return b""
        return (
            self.broadcast(self._to_tensor(data if self.is_main else bytes(length)))
            .cpu()
            .numpy()
            .tobytes()
        )

    def raise_on_any_rank(self, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``. If it raises ConfigError or TransientError on any rank, raise such
        an error on all.

        The raised error is that of the lowest failing rank. Its message names that rank, unless
        that rank is rank 0 or all ranks fail with the same error. Collective: every rank must call
        this.
        """
        result = None
        failure = None
        try:
            result = attempt()
        except (ConfigError, TransientError) as error:
            failure = [isinstance(error, TransientError), str(error)]
        failures = self.all_gather_object(failure)
        for rank, found in enumerate(failures):
            if found is not None:
                kind = TransientError if found[0] else ConfigError
                text = found[1]
                raise kind(
                    text
                    if rank == 0 or failures.count(found) == len(failures)
                    else f"rank {rank}: {text}"
                )
        return result  # type: ignore[return-value]  # attempt() returned it

    def _to_tensor(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)


@contextmanager
def process_group(
    environment: Environment,
    *,
    device: Device,
    backend: Backend,
    num_threads: int | str,
    timeout_seconds: int,
) -> Iterator[World]:
    """Join the process group, yield this rank's `World`, and leave the group unless it was there
    before.

    A process joins at most once: the later jobs of a sweep use the group of the first. Every
    reference to a DDP module must be gone at the end of the context. ConfigError if this machine
    lacks the device or the backend; TimeoutError names the ranks that did not join within
    `timeout_seconds`. Collective: every rank must call this.
    """
    torch_device, chosen = choose_device(device, backend, environment)
    threads = (
        num_threads
        if isinstance(num_threads, int)
        else max(1, usable_cores() // environment.local_world_size)
    )
    torch.set_num_threads(threads)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    was_initialized = dist.is_initialized()
    if was_initialized:
        require(
            dist.get_backend() == chosen,
            f"backend={chosen} differs from the first job's, but a sweep shares one process group:"
            " use one backend",
        )
    else:
        _join(environment, torch_device, chosen, timedelta(seconds=timeout_seconds))
    yield World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        device=torch_device,
        backend=chosen,
        num_threads=threads,
    )
    # Not after an exception, because other ranks may be gone and the traceback keeps DDP modules
    # alive.
    if not was_initialized:
        shutdown()


def choose_device(
    device: Device, backend: Backend, environment: Environment
) -> tuple[torch.device, str]:
    """Return the torch device and the name of the backend; ConfigError if this machine lacks one of
    them.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # a driver may be too old
    ranks = environment.local_world_size
    use_cuda = device is Device.cuda or (device is Device.auto and gpus > 0)
    if backend is Backend.nccl:
        require(
            gpus > 0,
            "backend=nccl needs a GPU and none is visible: use backend=gloo, or backend=auto",
        )
    if not use_cuda:
        return torch.device("cpu"), "gloo"
    require(gpus > 0, "device=cuda needs a GPU and none is visible: use device=cpu, or device=auto")
    require(
        ranks <= gpus,
        f"{ranks} ranks on this node need a GPU each and {gpus} are visible: use"
        f" --nproc_per_node={gpus}, or device=cpu",
    )
    return torch.device("cuda", environment.local_rank), (
        "gloo" if backend is Backend.gloo else "nccl"
    )


def _join(environment: Environment, device: torch.device, backend: str, timeout: timedelta) -> None:
    store: dist.Store = dist.HashStore()
    if environment.under_torchrun:
        set_interface(environment)
        environment.record_start()
        shared, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store = join_round(shared, rank=rank, world_size=world_size, timeout=timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" and environment.under_torchrun else None,
    )


def prepare(attempt: Callable[[], T], environment: Environment) -> Callable[[World], T]:
    """Call ``attempt()`` before joining the process group. Return a function that returns the
    result after joining.

    All ranks must call that function with the group's `World`. It returns the result, or raises on
    all ranks the ConfigError or TransientError that ``attempt()`` has raised on one of them. While
    ``attempt()`` runs, other ranks in `join_round` begin their timeout anew every `BUSY_SECONDS`,
    if a torchrun process, not rank 0, runs the store.
    """
    future: Future[T] = Future()
    done = threading.Event()

    def announce() -> None:
        store: dist.Store | None = None
        while not done.wait(BUSY_SECONDS):
            # the others have given up, and torchrun ends this rank
            with suppress(RuntimeError, ValueError):
                store = store or next(dist.rendezvous("env://"))[0]
                store.add(BUSY, 1)

    thread = threading.Thread(target=announce, name="busy", daemon=True)
    if environment.has_agent_store and environment.world_size > 1 and not dist.is_initialized():
        thread.start()
    try:
        future.set_result(attempt())
    except (ConfigError, TransientError) as error:
        future.set_exception(error)
    finally:
        done.set()
        if thread.is_alive():
            thread.join(BUSY_SECONDS)
    return lambda world: world.raise_on_any_rank(future.result)


def join_round(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a view of `store` only for the ranks of the latest (re)start; TimeoutError names the
    missing ranks.

    torchrun keeps its store when it restarts the ranks, and with it the addresses of processes that
    have ended: gloo would connect to those, and fail or wait forever. So each process writes a
    random nonce to the store, in place of the nonce of its rank's former process. Rank 0 publishes
    a name for the start with the nonces in the store, of which some may still be those of former
    processes. A process accepts the name only if its own nonce is among them. Collective: every
    rank must call this.
    """
    nonce = uuid.uuid4().hex
    own_name = uuid.uuid4().hex
    arrived = [f"arrived/{r}" for r in range(world_size)]
    deadline = time.monotonic() + timeout.total_seconds()
    joined = ["", *arrived[1:]]  # until rank 0 publishes a name with this nonce: rank 0 is missing
    store.set(arrived[rank], nonce)
    busy = store.add(BUSY, 0)
    while time.monotonic() < deadline:
        if (count := store.add(BUSY, 0)) != busy:
            busy = count
            deadline = time.monotonic() + timeout.total_seconds()
        if rank == 0:
            arrivals = [store.get(key).decode() for key in arrived if store.check([key])]
            store.set("round", json.dumps([own_name, *arrivals]))
        name, *nonces = json.loads(store.get("round")) if store.check(["round"]) else [""]
        if nonce in nonces:
            joined = [f"{name}/joined/{r}" for r in range(world_size)]
            store.set(joined[rank], "")
            # other ranks ask for one key only: there may be thousands
            if rank == 0 and store.check(joined):
                store.set(f"{name}/complete", "")
            if store.check([f"{name}/complete"]):
                return dist.PrefixStore(name, store)
        time.sleep(0.02)
    seconds = timeout.total_seconds()
    missing = [r for r, key in enumerate(joined) if not store.check([key])]
    raise TimeoutError(
        f"{world_size - len(missing)} of {world_size} ranks came within {seconds:.0f} s, "
        f"missing: {', '.join(map(str, missing))}"
    )


def shutdown() -> None:
    """Leave the process group, if any. The caller must have deleted all DDP modules: one may abort
    Python at exit.
    """
    gc.collect()  # DDP modules are in reference cycles
    if dist.is_initialized():
        dist.destroy_process_group()
