"""The measurements of benchmark and plan: steps of each strategy, steps without communication, and
the network.
"""

import gc
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_trainer import registry
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.schema import Config
from ddp_trainer.config.sync import (
    DDPConfig,
    NoSyncConfig,
    ParameterServerConfig,
    ReplicasConfig,
    SyncConfig,
)
from ddp_trainer.data.loaders import Batch, Loaders
from ddp_trainer.distributed.world import World
from ddp_trainer.observers.step_times import StepTimer
from ddp_trainer.start import Start
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.sync.ddp import DDPSync
from ddp_trainer.timing import median_seconds, synchronize
from ddp_trainer.tools.costs import VARIANTS, Compute, Network, sent_bytes
from ddp_trainer.training.loop import in_data_phase
from ddp_trainer.training.phase import TAGS, Phase
from ddp_trainer.training.step import TrainStep

Tags = dict[str, float]
"""The measurements of a `StepTimer` over several steps, by tag such as ``time/step_ms``."""
WARMUP_STEPS = 3
"""Minimum number of steps before measuring: DDP rebuilds its buckets after step 1, and PowerSGD
begins at step 3.
"""
MIN_ELEMENTS = 2**20
"""Minimum elements of the tensor that measures bandwidth: the time of a smaller tensor is mostly
latency.
"""


@dataclass(kw_only=True)
class StepRun:
    """A training step with its config, its timer and its batches."""

    config: Config
    step: TrainStep
    timer: StepTimer
    loaders: Loaders

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that need a gradient."""
        return [parameter for parameter in self.step.model.parameters() if parameter.requires_grad]

    def take_steps(self, count: int) -> Tags:
        """Take `count` optimizer steps, and return their step time, phases and images per second,
        by tag.
        """
        self.step.begin_training()
        self.timer.restart()
        for batch in islice(self.batches(), count):
            self.step(batch.images, batch.labels)
        self.timer.enter(Phase.gradient_sync)
        self.step.sync.synchronize(self.step.optimizer)
        return self.timer.close_window(self.step.settings.global_batch_size)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one epoch after another, without end, beginning after the steps
        already taken.
        """
        sampler = self.loaders.sampler
        while True:
            sampler.set_epoch(*divmod(self.step.count, sampler.steps_per_epoch))
            yield from in_data_phase(self.loaders.train, self.timer.enter)


def median_tags(windows: Sequence[Tags]) -> Tags:
    """Return the median over `windows` of the value of each tag."""
    return {tag: statistics.median(tags[tag] for tags in windows) for tag in windows[0]}


def build_step_run(begun: Start, loaders: Loaders | None = None) -> StepRun:
    """Return a new training step for the config and data of `begun`; loaders: those of another
    step; None: new ones.
    """
    step = begun.build_step()
    timer = StepTimer(begun.world.device, step.model)
    step.on_phase = timer.enter
    step.sync.begin()
    return StepRun(
        config=begun.config, step=step, timer=timer, loaders=loaders or begun.build_loaders()
    )


def without_other_ranks(world: World) -> World:
    """Return `world` as it would be if this rank were the only one."""
    return replace(world, rank=0, world_size=1, local_rank=0, local_world_size=1)


def compare_strategies(
    begun: Start, *, rounds: int, steps: int, names: Sequence[str] | None
) -> dict[str, Any] | None:
    """Measure strategies with the config of `begun`; return the content of benchmark.json on rank
    0, None elsewhere.

    names: choices of sync; None: all that can run here. Each round measures every strategy once, so
    that a slow minute of the machine slows all strategies. Collective; ConfigError on all ranks if
    one of `names` cannot run here.
    """
    runs, left_out = build_strategies(begun, names)
    if names is not None and left_out:
        runs.clear()  # a DDP module that is alive at exit may abort the interpreter
        raise ConfigError(next(iter(left_out.values())))
    for run in runs.values():
        measure(run, begun.world, steps=max(steps, WARMUP_STEPS))
    windows: dict[str, list[Tags]] = {name: [] for name in runs}
    order = deque(runs)
    for _ in range(rounds):
        for name in order:
            windows[name].append(measure(runs[name], begun.world, steps=steps))
        order.rotate(-1)
    if not begun.world.is_main:
        return None
    base = next(iter(windows.values()))
    rows = [
        to_row(name, run, windows=windows[name], base=base)
        for name, run in runs.items()
        if run is not None
    ]
    return {"about": about(begun), "rows": rows, "left_out": left_out}


def build_strategies(
    begun: Start, names: Sequence[str] | None
) -> tuple[dict[str, StepRun | None], dict[str, str]]:
    """Return two dicts by name: the training step of each strategy that can run, and why others
    cannot. Collective.

    A step is None on a rank that takes no part in the strategy. names: choices of sync; None: all
    choices.
    """
    runs: dict[str, StepRun | None] = {}
    left_out: dict[str, str] = {}
    loaders: Callable[[World], Loaders] = cache(
        lambda world: replace(begun, world=world).build_loaders()
    )
    for name in [name for name in registry.choices("sync") if names is None or name in names]:
        for variant, sync in variants(name, begun.world).items():
            try:
                runs[variant] = build_strategy_run(sync, begun, loaders)
            except ConfigError as error:
                left_out[variant] = str(error)
    return runs, left_out


def variants(name: str, world: World) -> dict[str, SyncConfig]:
    """Return, by row name in the table, the configs with which strategy `name` is measured: for
    ddp, one per hook.
    """
    if name == "replicas":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return {
            name: ReplicasConfig(
                devices=gpus if world.device.type == "cuda" else ["cpu"] * world.local_world_size
            )
        }
    known = {variant: config for variant, config in VARIANTS.items() if config.name == name}
    if name == "parameter_server":
        known[f"{name}, {world.world_size}"] = ParameterServerConfig(num_servers=world.world_size)
    return known or {name: registry.choices("sync")[name].schema()}


def build_strategy_run(
    sync: SyncConfig, begun: Start, loaders: Callable[[World], Loaders]
) -> StepRun | None:
    """Return the training step for `sync`; None on ranks other than 0 if `sync` uses one process.
    Collective.
    """
    all_ranks = begun.world
    alone = replace(
        without_other_ranks(all_ranks),
        num_threads=all_ranks.num_threads * all_ranks.local_world_size,
    )
    world = alone if sync.single_process else all_ranks
    begun = replace(begun, config=replace(begun.config, sync=sync), world=world)
    begun.config.check_world_size(world.world_size)
    takes_part = all_ranks.is_main or not sync.single_process
    return all_ranks.raise_on_any_rank(
        lambda: build_step_run(begun, loaders(world)) if takes_part else None
    )


def measure(run: StepRun | None, world: World, *, steps: int) -> Tags:
    """Take `steps` steps of `run` on all ranks at the same time; return the measurements by tag.
    Collective.

    One tag is the mean over ranks of the bytes sent per step. run: None on a rank that takes no
    steps: it returns only this tag.
    """
    world.all_gather_object(None)
    tags = {}
    before = count_sent_bytes()
    if run is not None:
        torch.set_num_threads(run.step.world.num_threads)
        tags = run.take_steps(steps)
        torch.set_num_threads(world.num_threads)
    by_rank = world.all_gather_object(count_sent_bytes() - before if world.local_rank == 0 else 0)
    return tags | {"sent_bytes": sum(by_rank) / world.world_size / steps}


def count_sent_bytes() -> int:
    """Return how many bytes this host (or network namespace) has sent over all interfaces; 0 if not
    on Linux.
    """
    path = Path("/proc/net/dev")  # only Linux has it
    return (
        sum(int(line.split(":")[1].split()[8]) for line in path.read_text().splitlines()[2:])
        if path.exists()
        else 0
    )


def to_row(name: str, run: StepRun, *, windows: list[Tags], base: list[Tags]) -> dict[str, Any]:
    """Return a row of benchmark.json: medians over the rounds, and the step time divided by that of
    `base`.
    """
    shapes = [tuple(parameter.shape) for parameter in run.parameters]
    size = run.step.world.world_size
    state = run.step.optimizer.state.get(run.parameters[0], {}).values()
    slots = sum(torch.is_tensor(value) and value.shape == shapes[0] for value in state)
    medians = median_tags(windows)
    pairs = zip(windows, base, strict=True)
    ratios = [tags["time/step_ms"] / of_base["time/step_ms"] for tags, of_base in pairs]
    return {
        "name": name,
        "images_per_second": medians["throughput/images_per_second"],
        "images_per_second_by_round": [tags["throughput/images_per_second"] for tags in windows],
        "step_ms": medians["time/step_ms"],
        "phases_ms": {phase: medians[f"time/{phase}_ms"] for phase in TAGS},
        "relative": statistics.median(ratios),
        "relative_min": min(ratios),
        "relative_max": max(ratios),
        "sent_bytes": medians["sent_bytes"],
        "expected_sent_bytes": sent_bytes(
            run.config.sync, shapes, world_size=size, num_state_tensors=slots
        ),
    }


def about(begun: Start) -> dict[str, Any]:
    """Return what was measured: model, data, batch size, precision, world size, device, versions
    and config.
    """
    config = begun.config
    world = begun.world
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else platform.processor()
    )
    return {
        "model": config.model.name,
        "data": config.data.name,
        "global_batch_size": config.global_batch_size,
        "precision": config.precision.name,
        "world_size": world.world_size,
        "device": device or world.device.type,
        "backend": world.backend,
        "torch": torch.__version__,
        "threads_per_rank": world.num_threads,
        "config": to_builtins(config),
    }


def measure_compute(begun: Start, *, steps: int) -> Compute:
    """Return the compute times of this rank with its share of the batch, and with half that share.
    Collective.
    """
    alone = without_other_ranks(begun.world)
    share = begun.config.global_batch_size // begun.world.world_size
    configs = [
        replace(begun.config, sync=NoSyncConfig(), global_batch_size=batch)
        for batch in (share, share // 2)
    ]
    run, smaller = (
        build_step_run(replace(begun, config=config, world=alone)) for config in configs
    )
    # Medians over three windows, after one window to warm up.
    tags, fewer = (
        median_tags([subject.take_steps(steps) for _ in range(4)][1:]) for subject in (run, smaller)
    )
    seconds = compute_seconds(tags)
    gradients = [torch.ones_like(parameter) for parameter in run.parameters]
    return Compute(
        batch=share,
        shapes=[tuple(parameter.shape) for parameter in run.parameters],
        forward_backward=seconds,
        per_image=(seconds - compute_seconds(fewer)) / (share - share // 2),
        other=tags["time/step_ms"] / 1e3 - seconds,
        ready=ready_times(run, steps=steps, forward_backward=seconds),
        copy=median_seconds(lambda: unflatten(flatten(gradients), gradients), alone.device),
        ddp_overhead=measure_ddp_overhead(run, steps=max(2, steps // 3)),
    )


def compute_seconds(tags: Tags) -> float:
    """Return the seconds per step of forward and backward, with the end of backward, which has a
    tag of its own.
    """
    return (tags["time/forward_backward_ms"] + tags["time/communication_ms"]) / 1e3


def measure_ddp_overhead(run: StepRun, *, steps: int) -> dict[str, float]:
    """Return for each communication hook how many seconds forward and backward take longer with DDP
    than without it.

    DDP gets a process group that consists of this rank only. Collective: every rank must call this.
    """
    group, _ = dist.new_subgroups(group_size=1)
    step = run.step
    bare = (run.step.sync, run.step.replica)
    configs = [config for config in VARIANTS.values() if isinstance(config, DDPConfig)]
    longer: dict[str, list[float]] = {config.comm_hook.name: [] for config in configs}
    for _ in range(3):
        seconds = compute_seconds(run.take_steps(steps))
        for config in configs:
            step.sync = DDPSync(config, step.world, group=group)
            step.replica = step.sync.wrap(step.model)
            run.take_steps(WARMUP_STEPS)
            longer[config.comm_hook.name].append(compute_seconds(run.take_steps(steps)) - seconds)
            step.sync, step.replica = bare
            gc.collect()  # frees the DDP module, which is in reference cycles, and its hooks
    dist.destroy_process_group(group)
    return {hook: max(0.0, statistics.median(differences)) for hook, differences in longer.items()}


def ready_times(run: StepRun, *, steps: int, forward_backward: float) -> list[float]:
    """Return for each parameter the seconds from the beginning of forward until the parameter's
    gradient is ready.

    These are medians over `steps` steps, all scaled by one factor so that the largest is
    `forward_backward` seconds.
    """
    began: list[float] = []
    times: list[list[float]] = [[] for _ in run.parameters]

    def now() -> float:
        synchronize(run.step.world.device)
        return time.perf_counter()

    handles = [run.step.model.register_forward_pre_hook(lambda *_: began.append(now()))]
    for parameter, seconds in zip(run.parameters, times, strict=True):
        hook = parameter.register_post_accumulate_grad_hook(
            lambda _, s=seconds: s.append(now() - began[-1])
        )
        handles.append(hook)
    run.take_steps(steps)
    for handle in handles:
        handle.remove()
    medians = [statistics.median(seconds) for seconds in times]
    return [median * forward_backward / max(medians) for median in medians]


def measure_network(compute: Compute, world: World) -> Network:
    """Measure all-reduces and return the latency, the bandwidth and the host's time per call.
    Collective.
    """
    device = world.device
    world_size = world.world_size
    large = torch.zeros(max(MIN_ELEMENTS, int(compute.size / 4)), device=device)
    gradients = [torch.zeros(shape, device=device) for shape in compute.shapes]
    latency, seconds = (
        median_seconds(lambda message=message: world.all_reduce(message), device)
        / (2 * (world_size - 1))
        for message in (large[:1], large)
    )
    network = Network(
        latency=latency, bandwidth=large.nbytes / world_size / max(1e-9, seconds - latency)
    )
    expected = sum(network.all_reduce(gradient.nbytes, world_size) for gradient in gradients)
    one_by_one = median_seconds(
        lambda: [world.all_reduce(gradient) for gradient in gradients], device, times=5
    )
    return replace(network, per_collective=max(0.0, one_by_one - expected) / len(gradients))
