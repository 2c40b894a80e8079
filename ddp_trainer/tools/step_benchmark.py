"""The measurements of benchmark and plan: steps of each strategy, and all-reduces."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import torch

from ddp_trainer import registry
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.sync import (
    NoSyncConfig,
    ParameterServerConfig,
    ReplicasConfig,
    SyncConfig,
)
from ddp_trainer.data.loaders import Loaders
from ddp_trainer.distributed.environment import installed_versions
from ddp_trainer.distributed.world import World
from ddp_trainer.observers.step_times import StepTimer
from ddp_trainer.start import Start
from ddp_trainer.timing import median_seconds
from ddp_trainer.tools.costs import VARIANTS, Compute, Network
from ddp_trainer.training.loop import in_data_phase
from ddp_trainer.training.phase import TAGS, Phase

Tags = dict[str, float]
"""The measurements of a `StepTimer` over several steps, by tag such as ``time/step_ms``."""
WARMUP_STEPS = 3
"""DDP rebuilds its buckets after step 1, and PowerSGD begins at step 3."""
LARGE = 2**22
"""Elements of the tensor that measures bandwidth: a smaller one measures mostly latency."""


class StepRun:
    """A training step for the config of `begun`, with a timer and with `loaders`."""

    def __init__(self, begun: Start, loaders: Loaders) -> None:
        self.loaders = loaders
        self.step = begun.build_step()
        self.timer = StepTimer(begun.world.device, self.step.model)
        self.step.on_phase = self.timer.enter
        self.step.sync.begin()

    def take_steps(self, count: int) -> Tags:
        """Take `count` optimizer steps; return step time, phases and images per second, by tag."""
        torch.set_num_threads(self.step.world.num_threads)
        sampler = self.loaders.sampler
        self.step.begin_training()
        self.timer.restart()
        end = self.step.count + count
        while self.step.count < end:
            sampler.set_epoch(*divmod(self.step.count, sampler.steps_per_epoch))
            batches = in_data_phase(self.loaders.train, self.timer.enter)
            for batch in islice(batches, end - self.step.count):
                self.step(batch.images, batch.labels)
        self.timer.enter(Phase.gradient_sync)
        self.step.sync.synchronize(self.step.optimizer)
        return self.timer.close_window(self.step.settings.global_batch_size)


def without_other_ranks(world: World) -> World:
    """Return `world` as it would be if this rank were the only one."""
    return replace(world, rank=0, world_size=1, local_rank=0, local_world_size=1)


def compare_strategies(
    begun: Start, *, rounds: int, steps: int, names: Sequence[str] | None
) -> dict[str, Any] | None:
    """Measure strategies; return the content of benchmark.json on rank 0, None elsewhere.

    names: choices of sync; None: all that can run here. Each round measures every strategy once, so
    that a slow minute of the machine slows all strategies. Collective; ConfigError on all ranks if
    one of `names` cannot run here.
    """
    world = begun.world
    runs, left_out = build_strategies(begun, names)
    if names is not None and left_out:
        runs.clear()  # a DDP module that is alive at exit may abort the interpreter
        raise ConfigError(next(iter(left_out.values())))
    windows: dict[str, list[Tags]] = {name: [] for name in runs}
    for count in [max(steps, WARMUP_STEPS)] + rounds * [steps]:
        for name, run in runs.items():
            world.all_gather_object(None)
            windows[name].append({} if run is None else run.take_steps(count))
    torch.set_num_threads(world.num_threads)
    if not world.is_main:
        return None
    measured = {name: tags[1:] for name, tags in windows.items()}
    base = next(iter(measured.values()))
    return {
        "title": title(begun),
        "versions": installed_versions(),
        "config": to_builtins(begun.config),
        "rows": [{"name": name, **summarize(tags, base)} for name, tags in measured.items()],
        "left_out": left_out,
    }


def build_strategies(
    begun: Start, names: Sequence[str] | None
) -> tuple[dict[str, StepRun | None], dict[str, str]]:
    """Return the step of each strategy that can run, and why others cannot. Collective.

    A step is None on a rank that takes no part in the strategy. names: choices of sync; None: all
    choices.
    """
    world = begun.world
    num_threads = world.num_threads * world.local_world_size
    alone = replace(without_other_ranks(world), num_threads=num_threads)
    loaders: Callable[[World], Loaders] = cache(
        lambda world: replace(begun, world=world).build_loaders()
    )
    runs: dict[str, StepRun | None] = {}
    left_out: dict[str, str] = {}

    def build(sync: SyncConfig) -> StepRun | None:
        own = alone if sync.single_process else world
        config = replace(begun.config, sync=sync)
        config.check_world_size(own.world_size)
        if sync.single_process and not world.is_main:
            return None
        return StepRun(replace(begun, config=config, world=own), loaders(own))

    for name in names or registry.choices("sync"):
        for variant, sync in variants(name, world).items():
            try:
                runs[variant] = world.raise_on_any_rank(lambda sync=sync: build(sync))
            except ConfigError as error:
                left_out[variant] = str(error)
    return runs, left_out


def variants(name: str, world: World) -> dict[str, SyncConfig]:
    """Return the configs with which the strategy `name` is measured, by row name in the table."""
    if name == "replicas":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = gpus if world.device.type == "cuda" else ["cpu"] * world.local_world_size
        return {name: ReplicasConfig(devices=devices)}
    known = {variant: config for variant, config in VARIANTS.items() if config.name == name}
    if name == "parameter_server":
        known[f"{name}, {world.world_size}"] = ParameterServerConfig(num_servers=world.world_size)
    return known or {name: registry.choices("sync")[name].schema()}


def summarize(windows: list[Tags], base: list[Tags]) -> dict[str, Any]:
    """Return medians over the rounds `windows`; step times are divided by those of `base`."""
    medians = median_tags(windows)
    ratios = [
        tags["time/step_ms"] / first["time/step_ms"]
        for tags, first in zip(windows, base, strict=True)
    ]
    return {
        "images_per_second": medians["throughput/images_per_second"],
        "step_ms": medians["time/step_ms"],
        "phases_ms": {phase: medians[f"time/{phase}_ms"] for phase in TAGS},
        "relative": statistics.median(ratios),
        "relative_min": min(ratios),
        "relative_max": max(ratios),
    }


def median_tags(windows: Sequence[Tags]) -> Tags:
    """Return the median over `windows` of the value of each tag."""
    return {tag: statistics.median(tags[tag] for tags in windows) for tag in windows[0]}


def title(begun: Start) -> str:
    """Return the measured job, for example as the title of the table."""
    config = begun.config
    world = begun.world
    is_cuda = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if is_cuda else "CPU"
    return (
        f"{config.model.name}, {config.data.name}, {world.world_size} ranks of"
        f" {world.num_threads} thread(s), {device}, {world.backend}, {config.precision.name},"
        f" global batch {config.global_batch_size}"
    )


def measure_compute(begun: Start, *, steps: int) -> Compute:
    """Return the compute times of this rank with its share of the batch."""
    batch = begun.config.global_batch_size // begun.world.world_size
    config = replace(begun.config, sync=NoSyncConfig(), global_batch_size=batch)
    alone = replace(begun, config=config, world=without_other_ranks(begun.world))
    run = StepRun(alone, alone.build_loaders())
    run.take_steps(WARMUP_STEPS)
    tags = median_tags([run.take_steps(steps) for _ in range(3)])
    # The end of backward has a tag of its own.
    seconds = (tags["time/forward_backward_ms"] + tags["time/communication_ms"]) / 1e3
    sizes = [4 * p.numel() for p in run.step.model.parameters() if p.requires_grad]
    return Compute(
        batch=batch,
        forward_backward=seconds,
        other=tags["time/step_ms"] / 1e3 - seconds,
        gradient_bytes=sum(sizes),
        num_gradients=len(sizes),
    )


def measure_network(world: World) -> Network:
    """Return latency and bandwidth, measured by all-reduces. Collective."""
    large = torch.zeros(LARGE, device=world.device)
    num_messages = 2 * (world.world_size - 1)
    latency, seconds = (
        median_seconds(lambda message=message: world.all_reduce(message), world.device)
        / num_messages
        for message in (large[:1], large)
    )
    share = large.nbytes / world.world_size
    return Network(latency=latency, bandwidth=share / max(1e-9, seconds - latency))
