"""The measurements of a plan: the computing time of a step, and the cost of messages between the ranks."""

import gc
import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from ddp_trainer.commands.step_benchmark import StepRun, build_step_run, without_other_ranks
from ddp_trainer.config.sync import DDPConfig, NoSyncConfig
from ddp_trainer.distributed.process_group import World
from ddp_trainer.performance.costs import VARIANTS, Compute, Network
from ddp_trainer.performance.timing import median_seconds, synchronize
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.sync.ddp import DDPSync
from ddp_trainer.training.start import Start

MIN_ELEMENTS = 2**20
"""Of the message that measures bandwidth: a smaller one, such as LeNet's gradients, measures latency again."""


def calibrate(begun: Start, *, network: Network | None, steps: int) -> tuple[Compute, Network]:
    """Return the measured computation of a step, and `network` or the measured cost of messages. Collective."""
    alone, share = without_other_ranks(begun.world), begun.config.global_batch_size // begun.world.world_size
    configs = [replace(begun.config, sync=NoSyncConfig(), global_batch_size=batch) for batch in (share, share // 2)]
    run, smaller = (build_step_run(replace(begun, config=config, world=alone)) for config in configs)
    compute = measure_compute(run, smaller, steps=steps)
    return compute, network or measure_network(compute, begun.world)


def measure_compute(run: StepRun, smaller: StepRun, *, steps: int) -> Compute:
    """Return the times of `run`, with those of a smaller batch to tell the time per image. Collective."""
    seconds, step_seconds = median_times(run, steps=steps)
    fewer_seconds, _ = median_times(smaller, steps=steps)
    batch, fewer_images = (subject.step.settings.global_batch_size for subject in (run, smaller))
    gradients = [torch.ones_like(parameter) for parameter in run.parameters]
    return Compute(
        batch=batch,
        shapes=[tuple(parameter.shape) for parameter in run.parameters],
        forward_backward=seconds,
        per_image=(seconds - fewer_seconds) / (batch - fewer_images),
        other=step_seconds - seconds,
        ready=ready_times(run, steps=steps, forward_backward=seconds),
        copy=median_seconds(lambda: unflatten(flatten(gradients), gradients), run.step.world.device),
        ddp_overhead=measure_ddp_overhead(run, steps=max(2, steps // 3)),
    )


def median_times(run: StepRun, *, steps: int) -> tuple[float, float]:
    """Return the seconds of forward and backward, and of a step: medians over three windows, after one to warm up."""
    windows = [run.take_steps(steps) for _ in range(4)][1:]
    step_ms = statistics.median(window["time/step_ms"] for window in windows)
    return statistics.median(map(compute_seconds, windows)), step_ms / 1e3


def compute_seconds(tags: dict[str, float]) -> float:
    """Return the seconds of forward and backward, in which a rank alone has no communication."""
    return (tags["time/forward_backward_ms"] + tags["time/communication_ms"]) / 1e3


def measure_ddp_overhead(run: StepRun, *, steps: int) -> dict[str, float]:
    """Return how many seconds forward and backward take longer inside DDP on one rank, by hook. Collective."""
    group, _ = dist.new_subgroups(group_size=1)
    step, bare = run.step, (run.step.sync, run.step.replica)
    configs = {config.comm_hook.name: config for config in VARIANTS.values() if isinstance(config, DDPConfig)}
    longer: dict[str, list[float]] = {hook: [] for hook in configs}
    for _ in range(3):
        seconds = compute_seconds(run.take_steps(steps))
        for hook, config in configs.items():
            step.sync = DDPSync(config, step.world, group=group)
            step.replica = step.sync.wrap(step.model)
            run.take_steps(3)  # DDP rebuilds its buckets after the first step, PowerSGD begins at the third
            longer[hook].append(compute_seconds(run.take_steps(steps)) - seconds)
            step.sync, step.replica = bare
            gc.collect()  # the DDP module, which is in reference cycles, and its hooks
    dist.destroy_process_group(group)
    return {hook: max(0.0, statistics.median(differences)) for hook, differences in longer.items()}


def ready_times(run: StepRun, *, steps: int, forward_backward: float) -> list[float]:
    """Return when the gradient of each parameter is ready, the last of them after `forward_backward` seconds."""
    began: list[float] = []
    times: list[list[float]] = [[] for _ in run.parameters]

    def now() -> float:
        synchronize(run.step.world.device)
        return time.perf_counter()

    handles = [run.step.model.register_forward_pre_hook(lambda *_: began.append(now()))]
    for parameter, seconds in zip(run.parameters, times, strict=True):
        hook = parameter.register_post_accumulate_grad_hook(lambda _, s=seconds: s.append(now() - began[-1]))
        handles.append(hook)
    run.take_steps(steps)
    for handle in handles:
        handle.remove()
    medians = [statistics.median(seconds) for seconds in times]
    return [median * forward_backward / max(medians) for median in medians]


def measure_network(compute: Compute, world: World) -> Network:
    """Return the cost of messages in this process group. Collective: every rank must call this."""
    device, world_size = world.device, world.world_size
    large = torch.zeros(max(MIN_ELEMENTS, int(compute.size / 4)), device=device)
    gradients = [torch.zeros(shape, device=device) for shape in compute.shapes]
    latency, seconds = (
        median_seconds(lambda message=message: world.all_reduce(message), device) / (2 * (world_size - 1))
        for message in (large[:1], large)
    )
    network = Network(latency=latency, bandwidth=large.nbytes / world_size / max(1e-9, seconds - latency))
    expected = sum(network.all_reduce(gradient.nbytes, world_size) for gradient in gradients)
    one_by_one = median_seconds(lambda: [world.all_reduce(gradient) for gradient in gradients], device, times=5)
    return replace(network, per_collective=max(0.0, one_by_one - expected) / len(gradients))
