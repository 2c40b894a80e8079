"""Training steps to be measured, of one strategy or of all side by side: the step that training uses, and its data."""

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_trainer import registry
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.sync import ParameterServerConfig, ReplicasConfig, SyncConfig
from ddp_trainer.data.loaders import Batch, Loaders
from ddp_trainer.distributed.process_group import World
from ddp_trainer.performance.costs import VARIANTS, sent_bytes
from ddp_trainer.performance.step_timer import PHASES, StepTimer
from ddp_trainer.training.run import build_step
from ddp_trainer.training.start import Start
from ddp_trainer.training.step import TrainStep

WARMUP_STEPS = 3
"""At least so many steps are not measured: DDP rebuilds its buckets after the first, PowerSGD begins at the third."""


@dataclass(kw_only=True)
class StepRun:
    """A training step with its timer and its batches."""

    step: TrainStep
    timer: StepTimer
    loaders: Loaders

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that need a gradient."""
        return [parameter for parameter in self.step.model.parameters() if parameter.requires_grad]

    def take_steps(self, count: int) -> dict[str, float]:
        """Take `count` optimizer steps and return the timer's tags."""
        self.step.begin_training()
        self.timer.restart()
        for batch in islice(self.batches(), count):
            self.step(batch.images, batch.labels)
        self.timer.enter("gradient sync")
        self.step.sync.synchronize(self.step.optimizer)
        return self.timer.close_window(self.step.settings.global_batch_size)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one epoch after another, from the position of the step on."""
        sampler = self.loaders.sampler
        while True:
            sampler.set_epoch(*divmod(self.step.count, sampler.steps_per_epoch))
            yield from self.timer.timed(self.loaders.train)


def build_step_run(begun: Start, loaders: Loaders | None = None) -> StepRun:
    """Return the step of `begun`, ready for its first batch; `loaders` may be shared with other steps."""
    timer, step = build_step(begun)
    step.sync.begin()
    return StepRun(step=step, timer=timer, loaders=loaders or begun.build_loaders())


def without_other_ranks(world: World) -> World:
    """Return the world of this rank if there were no others."""
    return replace(world, rank=0, world_size=1, local_rank=0, local_world_size=1)


# --- strategies side by side --------------------------------------------------------------------


@dataclass(kw_only=True)
class StrategyRun:
    """One strategy: its step, where this rank takes part in it, and the measurements."""

    name: str
    begun: Start
    """With its config, and the ranks that train: all, or rank 0 alone."""
    run: StepRun | None
    rounds: list[dict[str, float]] = field(default_factory=list)
    """The timer's tags."""
    sent: list[float] = field(default_factory=list)
    """Bytes per rank and step that left through the network interfaces, by round."""


def compare_strategies(begun: Start, *, rounds: int, steps: int, names: Sequence[str] | None) -> dict[str, Any] | None:
    """Measure strategies on the model and data of `begun`, and return the result as JSON values on rank 0.

    `names` are choices of sync; None stands for all that can run here. Rounds are interleaved, so that a slow minute of
    the machine slows all strategies. Collective; ConfigError on all ranks if one of `names` cannot run here.
    """
    runs, left_out = build_strategy_runs(begun, names)
    if names is not None and left_out:
        runs.clear()  # a DDP module that is alive at exit may abort the interpreter
        raise ConfigError(next(iter(left_out.values())))
    for run in runs:
        measure(run, begun.world, steps=max(steps, WARMUP_STEPS))
        run.rounds, run.sent = [], []
    for number in range(rounds):
        for index in range(len(runs)):
            measure(runs[(number + index) % len(runs)], begun.world, steps=steps)
    if not begun.world.is_main:
        return None
    return {"about": about(begun), "rows": [to_row(run, base=runs[0]) for run in runs], "left_out": left_out}


def build_strategy_runs(begun: Start, names: Sequence[str] | None) -> tuple[list[StrategyRun], dict[str, str]]:
    """Return the strategies that can run here, and for each of the others the reason. Collective."""
    runs: list[StrategyRun] = []
    left_out: dict[str, str] = {}
    loaders: Callable[[World], Loaders] = cache(lambda world: replace(begun, world=world).build_loaders())
    for name in [name for name in registry.choices("sync") if names is None or name in names]:
        for variant, sync in variants(name, begun.world).items():
            try:
                runs.append(build_strategy_run(variant, sync, begun, loaders))
            except ConfigError as error:
                left_out[variant] = str(error)
    return runs, left_out


def variants(name: str, world: World) -> dict[str, SyncConfig]:
    """Return the options with which a strategy is compared, by name in the table."""
    if name == "replicas":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return {name: ReplicasConfig(devices=gpus if world.device.type == "cuda" else ["cpu"] * world.local_world_size)}
    known = {variant: config for variant, config in VARIANTS.items() if config.name == name}
    if name == "parameter_server":
        known[f"{name}, {world.world_size}"] = ParameterServerConfig(num_servers=world.world_size)
    return known or {name: registry.choices("sync")[name].schema()}


def build_strategy_run(name: str, sync: SyncConfig, begun: Start, loaders: Callable[[World], Loaders]) -> StrategyRun:
    """Return one strategy with its step, on rank 0 alone if it is for a single process. Collective."""
    all_ranks = begun.world
    alone = replace(without_other_ranks(all_ranks), num_threads=all_ranks.num_threads * all_ranks.local_world_size)
    world = alone if sync.single_process else all_ranks
    begun = replace(begun, config=replace(begun.config, sync=sync), world=world)
    begun.config.check_world_size(world.world_size)
    takes_part = all_ranks.is_main or not sync.single_process
    run = all_ranks.raise_on_any_rank(lambda: build_step_run(begun, loaders(world)) if takes_part else None)
    return StrategyRun(name=name, begun=begun, run=run)


def measure(subject: StrategyRun, world: World, *, steps: int) -> None:
    """Take `steps` optimizer steps of one strategy, begun on all ranks at once. Collective."""
    world.all_gather_object(None)
    before = count_sent_bytes()
    if subject.run is not None:
        torch.set_num_threads(subject.begun.world.num_threads)
        subject.rounds.append(subject.run.take_steps(steps))
        torch.set_num_threads(world.num_threads)
    by_rank = world.all_gather_object(count_sent_bytes() - before if world.local_rank == 0 else 0)
    subject.sent.append(sum(by_rank) / world.world_size / steps)


def count_sent_bytes() -> int:
    """Return the number of bytes that this host (or network namespace) has sent, over all its interfaces."""
    path = Path("/proc/net/dev")  # only Linux has it
    return sum(int(line.split(":")[1].split()[8]) for line in path.read_text().splitlines()[2:]) if path.exists() else 0


def to_row(subject: StrategyRun, *, base: StrategyRun) -> dict[str, Any]:
    """Return the result of one strategy: medians over rounds, and the ratio of step times to `base` in each round."""
    assert subject.run is not None
    shapes = [tuple(parameter.shape) for parameter in subject.run.parameters]
    state = subject.run.step.optimizer.state.get(subject.run.parameters[0], {}).values()
    slots = sum(torch.is_tensor(value) and value.shape == shapes[0] for value in state)
    size, sync = subject.begun.world.world_size, subject.begun.config.sync
    expected = sent_bytes(sync, shapes, world_size=size, num_state_tensors=slots)
    medians = {tag: statistics.median(tags[tag] for tags in subject.rounds) for tag in subject.rounds[0]}
    pairs = zip(subject.rounds, base.rounds, strict=True)
    ratios = [tags["time/step_ms"] / of_base["time/step_ms"] for tags, of_base in pairs]
    return {
        "name": subject.name,
        "images_per_second": medians["throughput/images_per_second"],
        "images_per_second_by_round": [tags["throughput/images_per_second"] for tags in subject.rounds],
        "step_ms": medians["time/step_ms"],
        "phases_ms": {name: medians[f"time/{name}_ms"] for name in PHASES.values()},
        "relative": statistics.median(ratios),
        "relative_min": min(ratios),
        "relative_max": max(ratios),
        "sent_bytes": statistics.median(subject.sent),
        "expected_sent_bytes": expected,
    }


def about(begun: Start) -> dict[str, Any]:
    """Return the conditions of the measurement."""
    config, world = begun.config, begun.world
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    return {
        "model": config.model.name, "data": config.data.name, "global_batch_size": config.global_batch_size,
        "precision": config.precision.name, "world_size": world.world_size, "device": device or world.device.type,
        "backend": world.backend, "torch": torch.__version__, "threads_per_rank": world.num_threads,
        "config": to_builtins(config),
    }  # fmt: skip
