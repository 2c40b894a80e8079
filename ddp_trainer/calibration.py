"""What a plan is made from: what a step computes and what a message costs, measured on the ranks that there are."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.config import DDPConfig
from ddp_trainer.costs import shapes_of
from ddp_trainer.distributed import World
from ddp_trainer.prediction import HOOKS, Compute, Network
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.sync.ddp import DDPSync
from ddp_trainer.sync.ring import pass_on
from ddp_trainer.trainer import Trainer
from ddp_trainer.trial import take_steps


def measure_compute(trainer: Trainer, smaller: Trainer, *, steps: int) -> Compute:
    """Return what `trainer`, which must not communicate, and another of a smaller batch come to."""
    tags = [median_tags(subject, steps=steps) for subject in (trainer, smaller)]
    whole, less = (seconds(one, "forward_backward") + seconds(one, "communication") for one in tags)
    batch, other = (subject.config.global_batch_size for subject in (trainer, smaller))
    gradients = [torch.ones_like(parameter) for parameter in trainer.model.parameters()]
    flat = flatten(gradients)
    return Compute(
        batch=batch,
        shapes=shapes_of(trainer.model),
        forward_backward=whole,
        per_image=(whole - less) / (batch - other),
        rest=sum(seconds(tags[0], name) for name in ("data_wait", "optimizer", "other")),
        ready=ready_times(trainer, steps=steps, forward_backward=whole),
        copy=timed(lambda: unflatten(flatten(gradients), gradients), trainer.world),
        divide=timed(lambda: flat.div_(2), trainer.world),
        add=timed(lambda: flat.add_(flat), trainer.world),
        in_ddp=measure_in_ddp(trainer, steps=max(2, steps // 3)),
    )


def measure_in_ddp(trainer: Trainer, *, steps: int) -> dict[str, float]:
    """Return how many seconds forward and backward take longer inside of DDP that has nobody to talk to.

    Collective: every rank must call this.
    """
    lone, _ = dist.new_subgroups(group_size=1)
    bare, spent = trainer.replica, {name: [] for name in ("bare", *HOOKS)}
    for _ in range(3):
        for name, times in spent.items():
            if name in HOOKS:
                config = DDPConfig(comm_hook=HOOKS[name], powersgd_warmup_steps=2)
                trainer.replica = DDPSync(config, trainer.world, group=lone).wrap(trainer.model)
            take_steps(trainer, 3)  # buckets are built, PowerSGD begins
            tags = take_steps(trainer, steps)
            times.append(seconds(tags, "forward_backward") + seconds(tags, "communication"))
            trainer.replica = bare
            gc.collect()  # the DDP module, which sits in reference cycles, and its hooks
    dist.destroy_process_group(lone)
    medians = {name: statistics.median(times) for name, times in spent.items()}
    return {name: max(0.0, medians[name] - medians["bare"]) for name in HOOKS}


def median_tags(trainer: Trainer, *, steps: int) -> dict[str, float]:
    """Return the timeline's tags, medians over three windows after one to warm up."""
    windows = [take_steps(trainer, steps) for _ in range(4)][1:]
    return {name: statistics.median(window[name] for window in windows) for name in windows[0]}


def seconds(tags: dict[str, float], phase: str) -> float:
    """Return a phase's time of a step in seconds."""
    return tags[f"time/{phase}_ms"] / 1e3


def ready_times(trainer: Trainer, *, steps: int, forward_backward: float) -> list[float]:
    """Return when each parameter's gradient is there, the last after `forward_backward` seconds."""
    parameters = list(trainer.model.parameters())
    found: list[list[float]] = [[] for _ in parameters]
    stamps: list[float] = [0.0]

    def note(index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            synchronize(trainer.world)
            found[index].append(time.perf_counter() - stamps[0])

        return hook

    handles = [parameter.register_post_accumulate_grad_hook(note(index)) for index, parameter in enumerate(parameters)]
    forward = trainer.model.register_forward_pre_hook(lambda *_: stamps.__setitem__(0, time.perf_counter()))
    take_steps(trainer, steps)
    for handle in [*handles, forward]:
        handle.remove()
    medians = [statistics.median(times) for times in found]
    return [when * forward_backward / max(medians) for when in medians]


def measure_network(world: World, compute: Compute, trainer: Trainer) -> Network:
    """Return what messages of this process group cost, up to the size of all gradients, and what they cost `trainer`.

    Collective: every rank must call this.
    """
    size = compute.size
    elements = int(size // 4)
    rounds = 2 * (world.world_size - 1)
    small, large = torch.zeros(1, device=world.device), torch.zeros(elements, device=world.device)
    latency = timed(lambda: world.sum(small), world) / rounds
    bandwidth = size / world.world_size / max(1e-9, timed(lambda: world.sum(large), world) / rounds - latency)
    part = torch.zeros(elements // world.world_size, device=world.device)
    room = torch.empty_like(part)

    def exchange(outgoing: Tensor, incoming: Tensor) -> None:
        pass_on(outgoing, incoming, rank=world.rank, world_size=world.world_size)

    pair_latency = timed(lambda: exchange(small, small.clone()), world)
    pair_bandwidth = 4 * len(part) / max(1e-9, timed(lambda: exchange(part, room), world) - pair_latency)
    many = [torch.zeros(1, device=world.device) for _ in range(64)]
    message = max(0.0, timed(lambda: exchange_many(many, world), world) - pair_latency) / len(many)
    found = Network(
        latency=latency, bandwidth=bandwidth, pair_latency=pair_latency, pair_bandwidth=pair_bandwidth, message=message,
        collective_message=0.0, interference=0.0,
    )  # fmt: skip
    gradients = [torch.zeros(shape, device=world.device) for shape in compute.shapes]
    alike = sum(found.all_reduce(4.0 * gradient.numel(), world.world_size) for gradient in gradients)
    one_by_one = timed(lambda: [world.sum(gradient) for gradient in gradients], world, times=5)
    found = replace(found, collective_message=max(0.0, one_by_one - alike) / len(gradients))
    found = replace(found, interference=measure_interference(trainer, world, compute, found, large))
    return Network(**world.broadcast(asdict(found)))


def measure_interference(trainer: Trainer, world: World, compute: Compute, network: Network, large: Tensor) -> float:
    """Return the seconds that forward and backward take longer for each byte of `large` all-reduced meanwhile.

    Collective: every rank must call this.
    """
    pending: list[dist.Work] = []

    def send(*_: object) -> None:
        if work := dist.all_reduce(large, async_op=True):
            pending.append(work)

    handle = trainer.model.register_forward_pre_hook(send)
    found = []
    for _ in range(8):
        tags = take_steps(trainer, 1)
        found.append(seconds(tags, "forward_backward") + seconds(tags, "communication"))
        while pending:
            pending.pop().wait()
    handle.remove()
    spent = statistics.median(found)
    overlapped = compute.size * min(1.0, spent / network.all_reduce(compute.size, world.world_size))
    return max(0.0, spent - compute.forward_backward) / overlapped


def exchange_many(tensors: list[Tensor], world: World) -> None:
    """Send `tensors` to the next rank while receiving as many from the one before."""
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    operations = [dist.P2POp(dist.irecv, tensor.clone(), before) for tensor in tensors]
    operations += [dist.P2POp(dist.isend, tensor, after) for tensor in tensors]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def timed(do: Callable[[], Any], world: World, *, times: int = 15) -> float:
    """Return the median seconds of ``do()``."""
    found = []
    for _ in range(times + 3):
        synchronize(world)
        began = time.perf_counter()
        do()
        synchronize(world)
        found.append(time.perf_counter() - began)
    return statistics.median(found[3:])


def synchronize(world: World) -> None:
    """Wait for the device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
