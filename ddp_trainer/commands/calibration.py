"""The measurements of a plan: the computing time of a step, and the cost of messages between the ranks."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_trainer.commands.step_benchmark import StepRun, build_step_run, without_other_ranks
from ddp_trainer.config.sync import DDPConfig, NoSyncConfig
from ddp_trainer.distributed.process_group import World
from ddp_trainer.performance.step_time_model import HOOKS, Compute, Network
from ddp_trainer.performance.timing import call_seconds, synchronize
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.sync.ddp import DDPSync
from ddp_trainer.sync.ring import pass_on
from ddp_trainer.training.start import Start


def calibrate(begun: Start, *, network: Network | None, steps: int) -> tuple[Compute, Network] | None:
    """Return on rank 0 what a step computes, and the cost of messages unless `network` is given; None on other ranks.

    Collective: every rank must call this.
    """
    alone, share = without_other_ranks(begun.world), begun.config.global_batch_size // begun.world.world_size
    configs = [replace(begun.config, sync=NoSyncConfig(), global_batch_size=batch) for batch in (share, share // 2)]
    run, smaller = (build_step_run(replace(begun, config=config, world=alone)) for config in configs)
    compute = measure_compute(run, smaller, steps=steps)
    network = network or measure_network(run, compute, begun.world)
    return (compute, network) if begun.world.is_main else None


def measure_compute(run: StepRun, smaller: StepRun, *, steps: int) -> Compute:
    """Return the times of `run`, with those of a smaller batch to tell the time per image. Collective."""
    tags, fewer = median_tags(run, steps=steps), median_tags(smaller, steps=steps)
    batch, fewer_images = (subject.step.settings.global_batch_size for subject in (run, smaller))
    gradients = [torch.ones_like(parameter) for parameter in run.parameters]
    flat, device = flatten(gradients), run.step.world.device
    return Compute(
        batch=batch,
        shapes=[tuple(parameter.shape) for parameter in run.parameters],
        forward_backward=compute_seconds(tags),
        per_image=(compute_seconds(tags) - compute_seconds(fewer)) / (batch - fewer_images),
        other=sum(tags[f"time/{name}_ms"] for name in ("data_wait", "optimizer", "other")) / 1e3,
        ready=ready_times(run, steps=steps, forward_backward=compute_seconds(tags)),
        copy=median_seconds(lambda: unflatten(flatten(gradients), gradients), device),
        divide=median_seconds(lambda: flat.div_(2), device),
        add=median_seconds(lambda: flat.add_(flat), device),
        ddp_overhead=measure_ddp_overhead(run, steps=max(2, steps // 3)),
    )


def median_tags(run: StepRun, *, steps: int) -> dict[str, float]:
    """Return the timer's tags: medians over three windows, after one to warm up."""
    windows = [run.take_steps(steps) for _ in range(4)][1:]
    return {name: statistics.median(window[name] for window in windows) for name in windows[0]}


def compute_seconds(tags: dict[str, float]) -> float:
    """Return the seconds of forward and backward, in which a rank alone has no communication."""
    return (tags["time/forward_backward_ms"] + tags["time/communication_ms"]) / 1e3


def measure_ddp_overhead(run: StepRun, *, steps: int) -> dict[str, float]:
    """Return how many seconds forward and backward take longer inside DDP on one rank, by strategy. Collective."""
    group, _ = dist.new_subgroups(group_size=1)
    step, bare, bare_sync = run.step, run.step.replica, run.step.sync
    times: dict[str, list[float]] = {name: [] for name in ("bare", *HOOKS)}
    for _ in range(3):
        for name, seconds in times.items():
            if name in HOOKS:
                config = DDPConfig(comm_hook=HOOKS[name], powersgd_warmup_steps=2)
                step.sync = DDPSync(config, step.world, group=group)
                step.replica = step.sync.wrap(step.model)
            run.take_steps(3)  # DDP rebuilds its buckets after the first step, PowerSGD begins at the third
            seconds.append(compute_seconds(run.take_steps(steps)))
            step.replica, step.sync = bare, bare_sync
            gc.collect()  # the DDP module, which is in reference cycles, and its hooks
    dist.destroy_process_group(group)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {name: max(0.0, medians[name] - medians["bare"]) for name in HOOKS}


def ready_times(run: StepRun, *, steps: int, forward_backward: float) -> list[float]:
    """Return when the gradient of each parameter is ready, the last of them after `forward_backward` seconds."""
    parameters, began = run.parameters, [0.0]
    times: list[list[float]] = [[] for _ in parameters]

    def record(index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            synchronize(run.step.world.device)
            times[index].append(time.perf_counter() - began[0])

        return hook

    handles = [parameter.register_post_accumulate_grad_hook(record(i)) for i, parameter in enumerate(parameters)]
    forward = run.step.model.register_forward_pre_hook(lambda *_: began.__setitem__(0, time.perf_counter()))
    run.take_steps(steps)
    for handle in [*handles, forward]:
        handle.remove()
    medians = [statistics.median(seconds) for seconds in times]
    return [median * forward_backward / max(medians) for median in medians]


def measure_network(run: StepRun, compute: Compute, world: World) -> Network:
    """Return the cost of messages in this process group, up to the size of all gradients, and their effect on `run`.

    Collective: every rank must call this.
    """
    device, rounds, elements = world.device, 2 * (world.world_size - 1), int(compute.size // 4)
    small, large = torch.zeros(1, device=device), torch.zeros(elements, device=device)
    part, room = (torch.zeros(elements // world.world_size, device=device) for _ in range(2))
    many = [torch.zeros(1, device=device) for _ in range(64)]
    gradients = [torch.zeros(shape, device=device) for shape in compute.shapes]

    def exchange(outgoing: Tensor, incoming: Tensor) -> None:
        pass_on(outgoing, incoming, rank=world.rank, world_size=world.world_size)

    latency = median_seconds(lambda: world.all_reduce(small), device) / rounds
    round_seconds = median_seconds(lambda: world.all_reduce(large), device) / rounds
    pair_latency = median_seconds(lambda: exchange(small, small.clone()), device)
    pair_seconds = median_seconds(lambda: exchange(part, room), device)
    many_seconds = median_seconds(lambda: exchange_many(many, world), device)
    network = Network(
        latency=latency,
        bandwidth=compute.size / world.world_size / max(1e-9, round_seconds - latency),
        pair_latency=pair_latency,
        pair_bandwidth=4 * len(part) / max(1e-9, pair_seconds - pair_latency),
        message=max(0.0, many_seconds - pair_latency) / len(many),
    )
    expected = sum(network.all_reduce(4.0 * gradient.numel(), world.world_size) for gradient in gradients)
    one_by_one = median_seconds(lambda: [world.all_reduce(gradient) for gradient in gradients], device, times=5)
    network = replace(
        network,
        collective_message=max(0.0, one_by_one - expected) / len(gradients),
        interference=measure_interference(run, compute, network.all_reduce(compute.size, world.world_size), large),
    )
    return Network(**world.broadcast_object(asdict(network)))


def measure_interference(run: StepRun, compute: Compute, all_reduce_seconds: float, large: Tensor) -> float:
    """Return how many seconds forward and backward take longer for each byte of `large` that is all-reduced meanwhile.

    Collective: every rank must call this.
    """
    pending: list[dist.Work] = []

    def send(*_: object) -> None:
        if work := dist.all_reduce(large, async_op=True):
            pending.append(work)

    handle = run.step.model.register_forward_pre_hook(send)
    times = []
    for _ in range(8):
        times.append(compute_seconds(run.take_steps(1)))
        while pending:
            pending.pop().wait()
    handle.remove()
    seconds = statistics.median(times)
    overlapped = compute.size * min(1.0, seconds / all_reduce_seconds)
    return max(0.0, seconds - compute.forward_backward) / overlapped


def exchange_many(tensors: list[Tensor], world: World) -> None:
    """Send `tensors` to the next rank while as many are received from the one before."""
    after, before = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size
    operations = [dist.P2POp(dist.irecv, tensor.clone(), before) for tensor in tensors]
    operations += [dist.P2POp(dist.isend, tensor, after) for tensor in tensors]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def median_seconds(function: Callable[[], Any], device: torch.device, *, times: int = 15) -> float:
    """Return the median seconds of ``function()``."""
    return statistics.median(call_seconds(function, device, times=times))
