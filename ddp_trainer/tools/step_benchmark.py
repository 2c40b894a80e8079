"""The measurements of benchmark and plan: steps of each strategy, and all-reduces."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ddp_trainer import registry
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.schema import RecoveryConfig
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
from ddp_trainer.start import Setup
from ddp_trainer.timing import median_seconds
from ddp_trainer.tools.activations import measure_activations
from ddp_trainer.tools.costs import VARIANTS, Compute, Network
from ddp_trainer.training.loop import in_data_phase
from ddp_trainer.training.phase import TAGS, Phase

Tags = dict[str, float]
"""The measurements of a `StepTimer` over several steps, by tag such as ``time/step_ms``."""
WARMUP_STEPS = 3
"""The minimum number of steps that are not measured.

DDP rebuilds its buckets after step 1, and PowerSGD starts to compress at step 3.
"""
LARGE = 2**22
"""Number of elements of the tensor that measures bandwidth; a small one measures mostly latency."""


class StepRun:
    """A training step for the config of `setup`, with a timer, and with `loaders` for batches."""

    def __init__(self, setup: Setup, loaders: Loaders) -> None:
        self.loaders = loaders
        self.step = setup.build_step()
        self.timer = StepTimer(setup.world.device, self.step.model)
        self.step.on_phase = self.timer.enter
        self.step.sync.begin()

    def take_steps(self, count: int) -> Tags:
        """Take `count` optimizer steps; return their measurements (see `Tags`)."""
        torch.set_num_threads(self.step.world.num_threads)
        sampler = self.loaders.sampler
        self.step.begin_training()
        self.timer.restart()
        end = self.step.count + count
        while self.step.count < end:
            epoch, done = divmod(self.step.count, sampler.steps_per_epoch)
            sampler.set_epoch(epoch, done)
            last = min(end, (epoch + 1) * sampler.steps_per_epoch)
            batches = self.step.batches(
                self.loaders.train, last_step=last, next_control=lambda step, last=last: last
            )
            for batch in in_data_phase(batches, self.timer.enter):
                self.step(batch.images, batch.labels)
        self.timer.enter(Phase.gradient_sync)
        self.step.sync.synchronize(self.step.optimizer)
        return self.timer.close_window(count * self.step.settings.global_batch_size)


def without_other_ranks(world: World) -> World:
    """Return `world` as it would be if this rank were the only one."""
    return replace(world, rank=0, world_size=1, local_rank=0, local_world_size=1)


def compare_strategies(
    setup: Setup, *, rounds: int, steps: int, names: Sequence[str]
) -> dict[str, Any] | None:
    """Measure strategies; return the content of benchmark.json on rank 0, None elsewhere.

    Each round measures every strategy once, so that a slow minute of the machine slows all of them.
    Collective: every rank must call this. names: choices of sync; if empty, all choices that can
    run here.

    Raises:
        ConfigError: on all ranks, if one of `names` cannot run here.
    """
    world = setup.world
    runs, left_out = build_strategies(setup, names)
    measured: dict[str, list[Tags]] = {name: [] for name in runs}
    for count in [max(steps, WARMUP_STEPS)] + rounds * [steps]:
        for name, run in runs.items():
            world.all_gather_object(None)  # a barrier, because some strategies use rank 0 only
            if run is not None:
                measured[name].append(run.take_steps(count))
    torch.set_num_threads(world.num_threads)
    if not world.is_main:
        return None
    base = next(iter(measured.values()))
    return {
        "title": title(setup),
        "versions": installed_versions(),
        "config": to_builtins(setup.config),
        "rows": [{"name": name, **summarize(tags, base)} for name, tags in measured.items()],
        "left_out": left_out,
    }


def build_strategies(
    setup: Setup, names: Sequence[str]
) -> tuple[dict[str, StepRun | None], dict[str, str]]:
    """Return a `StepRun` per strategy, and for those that cannot run the reason. Collective.

    Both are by row name in the table. The `StepRun` is None on a rank that the strategy does not
    use. names: choices of sync; if empty, all choices.

    Raises:
        ConfigError: on all ranks, if one of `names` cannot run here.
    """
    world = setup.world
    num_threads = world.num_threads * world.local_world_size
    alone = replace(without_other_ranks(world), num_threads=num_threads)
    loaders = {own: replace(setup, world=own).build_loaders() for own in (world, alone)}
    runs: dict[str, StepRun | None] = {}
    left_out: dict[str, str] = {}

    def build(sync: SyncConfig) -> StepRun | None:
        own = alone if sync.single_process else world
        # Without CUDA graphs, because they have no phases and not all strategies can use them.
        config = replace(setup.config, sync=sync, cuda_graphs=False, recovery=RecoveryConfig())
        config.check_world_size(own.world_size)
        if sync.single_process and not world.is_main:
            return None
        return StepRun(replace(setup, config=config, world=own), loaders[own])

    for name in names or registry.choices("sync"):
        for variant, sync in variants(name, world).items():
            try:
                runs[variant] = world.raise_on_any_rank(lambda sync=sync: build(sync))
            except ConfigError as error:
                if names:
                    runs.clear()  # because a DDP module that exists at exit may abort the process
                    raise
                left_out[variant] = str(error)
    return runs, left_out


def variants(name: str, world: World) -> dict[str, SyncConfig]:
    """Return the configs to measure for the choice `name` of sync, by row name in the table."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    devices = gpus if world.device.type == "cuda" else ["cpu"] * world.local_world_size
    size = world.world_size
    known = VARIANTS | {
        f"parameter_server, {size}": ParameterServerConfig(num_servers=size),
        "replicas": ReplicasConfig(devices=devices),
    }
    own = {variant: config for variant, config in known.items() if config.name == name}
    return own or {name: registry.choices("sync")[name].schema()}


def summarize(windows: list[Tags], base: list[Tags]) -> dict[str, Any]:
    """Return a row of the table: medians over `windows`, except the first, which is the warm-up.

    The keys "relative…" have times per image divided by those of `base` in the same round.
    """
    medians = median_tags(windows[1:])
    ratios = [
        first["throughput/images_per_second"] / tags["throughput/images_per_second"]
        for tags, first in zip(windows[1:], base[1:], strict=True)
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


def title(setup: Setup) -> str:
    """Return a description of the measured job, which is the title of the table."""
    config = setup.config
    world = setup.world
    is_cuda = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if is_cuda else "CPU"
    return (
        f"{config.model.name}, {config.data.name}, {world.world_size} ranks of"
        f" {world.num_threads} thread(s), {device}, {world.backend}, {config.precision.name},"
        f" global batch {config.global_batch_size}"
    )


def measure_compute(setup: Setup, *, steps: int) -> Compute:
    """Return the compute times of this rank with its share of the batch, without other ranks."""
    world_size = setup.world.world_size
    batch = setup.config.global_batch_size // world_size
    shards = setup.config.shards
    config = replace(
        setup.config,
        sync=NoSyncConfig(),
        global_batch_size=batch,
        shards=max(1, shards // world_size) if shards else None,
        cuda_graphs=False,
        recovery=RecoveryConfig(),
    )
    alone = replace(setup, config=config, world=without_other_ranks(setup.world))
    run = StepRun(alone, alone.build_loaders())
    run.take_steps(WARMUP_STEPS)
    tags = median_tags([run.take_steps(steps) for _ in range(3)])
    # The timer counts the end of backward, after the last gradient, as communication.
    seconds = (tags["time/forward_backward_ms"] + tags["time/communication_ms"]) / 1e3
    sizes = [4 * p.numel() for p in run.step.model.parameters() if p.requires_grad]
    return Compute(
        batch=batch,
        num_passes=config.gradient_accumulation_steps,
        forward_backward=seconds,
        other=tags["time/step_ms"] / 1e3 - seconds,
        gradient_bytes=sum(sizes),
        num_gradients=len(sizes),
        activations=measure_activations(run.step, setup.datasets.image_shape),
    )


def measure_network(world: World) -> Network:
    """Return latency and bandwidth, measured by a small and a large all-reduce. Collective."""
    large = torch.zeros(LARGE, device=world.device)
    num_messages = 2 * (world.world_size - 1)
    latency, seconds = (
        median_seconds(lambda message=message: world.all_reduce(message), world.device)
        / num_messages
        for message in (large[:1], large)
    )
    share = large.nbytes / world.world_size
    return Network(latency=latency, bandwidth=share / max(1e-9, seconds - latency))
