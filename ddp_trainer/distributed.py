"""The process group: joining, leaving, agreeing. Everything collective passes through `World`."""

from __future__ import annotations

import gc
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.config import Backend, Config, ConfigError, Device, require
from ddp_trainer.environment import Environment, usable_cores
from ddp_trainer.network import route_to

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This rank's place in the process group, and what ranks do together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    num_threads: int

    @property
    def is_main(self) -> bool:
        """Say whether this is rank 0, the one that writes."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum of `tensor` over ranks, in place. Collective: every rank must call this."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` (anything JSON holds). Collective: every rank must call this."""
        return self.gather(value)[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` (anything JSON holds), by rank. Collective: every rank must call this."""
        if self.world_size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(text)], device=self.device))
        longest = int(max(lengths))
        texts = [text.new_zeros(longest) for _ in lengths]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))))
        return [json.loads(bytes(text[: int(n)].cpu().numpy())) for text, n in zip(texts, lengths, strict=True)]

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's `tensor` (of one shape), by rank. Collective: every rank must call this."""
        if self.world_size == 1 or not tensor.numel():
            return [tensor] * self.world_size
        tensors = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(tensors, tensor)
        return tensors

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's `data`, however large. Collective: every rank must call this."""
        if self.world_size == 1:
            return data
        length = self.broadcast(len(data))
        buffer = torch.empty(length, dtype=torch.uint8, device=self.device)
        if self.is_main and length:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if length:
            dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def together(self, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``; if it is refused on any rank, raise the first refusal on all.

        Collective: every rank must call this.

        Raises:
            ConfigError: `attempt` raised one here or elsewhere; the rank is named unless it is all of them.
        """
        result, refusal = None, None
        try:
            result = attempt()
        except ConfigError as error:
            refusal = str(error)
        refusals = self.gather(refusal)
        refused = [rank for rank, text in enumerate(refusals) if text]
        if refused:
            where = "" if len(set(refusals)) == 1 or refused[0] == 0 else f"rank {refused[0]}: "
            raise ConfigError(f"{where}{refusals[refused[0]]}")
        return result  # type: ignore[return-value]  # attempt() returned it


def choose_device(config: Config, environment: Environment) -> tuple[torch.device, str]:
    """Return the device and backend that `config` asks for.

    Raises:
        ConfigError: there is no such device here, or the backend cannot serve it.
    """
    gpus = torch.cuda.device_count()
    use_cuda = config.device is Device.cuda or (config.device is Device.auto and gpus > 0)
    if config.backend is Backend.nccl:
        require(gpus > 0, "backend=nccl needs a GPU and none is visible: use backend=gloo, or backend=auto")
        require(use_cuda, "backend=nccl serves GPUs: set device=cuda, or use backend=gloo with device=cpu")
    if not use_cuda:
        return torch.device("cpu"), "gloo"
    require(gpus > 0, "device=cuda needs a GPU and none is visible: use device=cpu, or device=auto")
    require(
        environment.local_world_size <= gpus,
        f"{environment.local_world_size} ranks on this node need as many GPUs and {gpus} are visible: "
        f"use --nproc_per_node={gpus}, or device=cpu",
    )
    backend = "gloo" if config.backend is Backend.gloo else "nccl"
    return torch.device("cuda", environment.local_rank), backend


def choose_threads(config: Config, environment: Environment) -> int:
    """Return the number of intra-op threads for this rank."""
    if isinstance(config.num_threads, int):
        return config.num_threads
    return max(1, usable_cores() // environment.local_world_size)


def connect(config: Config, environment: Environment) -> World:
    """Join the process group and return this rank's `World`. Collective: every rank must call this.

    Joins at most once a process: a sweep's later jobs find the group of the first (torch has no destroy-then-init).

    Raises:
        ConfigError: the config asks for a device or backend that is not here.
    """
    device, backend = choose_device(config, environment)
    threads = choose_threads(config, environment)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join(environment, device, backend, timedelta(seconds=config.timeout_seconds))
    else:
        require(dist.get_backend() == backend, f"backend={backend}: the sweep's first job chose another")
    return World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        device=device,
        backend=backend,
        num_threads=threads,
    )


def _join(environment: Environment, device: torch.device, backend: str, timeout: timedelta) -> None:
    if not environment.under_torchrun:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    interface = "lo" if environment.is_one_node else route_to(environment.master_addr)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not environment.is_one_node:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        store=join_round(store, rank=rank, world_size=world_size, timeout=timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )


def join_round(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a view of `store` that only the ranks of this start share. Collective: every rank must call this.

    torchrun keeps its store through restarts, and with it the addresses of processes that are gone: gloo would
    call those and fail, or wait for ever. So rank 0 names the round, and a rank believes a name only when it comes
    with the nonce that this very process has sent.

    Raises:
        TimeoutError: some ranks did not come within `timeout`; they are named.
    """
    nonce, name, missing = uuid.uuid4().hex, uuid.uuid4().hex, [0]
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"hello/{rank}", nonce)
    while time.monotonic() < deadline:
        if rank == 0:
            _name_round(store, name, world_size)
        told: dict[str, Any] = json.loads(store.get("round")) if store.check(["round"]) else {"nonces": []}
        if nonce in told["nonces"]:
            store.set(f"{told['name']}/here/{rank}", "")
            missing = [r for r in range(world_size) if rank == 0 and not store.check([f"{name}/here/{r}"])]
            if not missing:
                return dist.PrefixStore(told["name"], store)
        time.sleep(0.02)
    raise TimeoutError(
        f"{world_size - len(missing)} of {world_size} ranks came within {timeout.total_seconds():.0f} s, "
        f"missing: {', '.join(map(str, missing))}"
    )


def _name_round(store: dist.Store, name: str, world_size: int) -> None:
    """Tell all who have said hello the name of the round; who has said it before in another round will again."""
    keys = [f"hello/{rank}" for rank in range(world_size)]
    nonces = [store.get(key).decode() for key in keys if store.check([key])]
    store.set("round", json.dumps({"name": name, "nonces": nonces}))


def shutdown() -> None:
    """Leave the process group, if this process is in one.

    Whoever calls must have dropped every reference to DDP modules: one alive at this point aborts the
    interpreter at exit in one of five two-rank runs.
    """
    gc.collect()  # DDP modules sit in reference cycles
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def connected(config: Config, environment: Environment) -> Iterator[World]:
    """Yield the `World` and leave the process group on the way out, unless it was there before."""
    was_initialized = dist.is_initialized()
    yield connect(config, environment)
    # Not after an exception: other ranks may be gone, and the traceback keeps DDP modules alive.
    if not was_initialized:
        shutdown()
