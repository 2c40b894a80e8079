"""Every strategy on the same model, data and seed, side by side: ``torchrun … -m ddp_trainer.benchmark [key=value …]``.

Rounds are interleaved: in each, every strategy takes some steps, so that a slow minute of the machine slows all of
them. Prints a table, and writes benchmark.json and benchmark.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ddp_trainer.command_line import for_each_job
from ddp_trainer.composition import to_builtins
from ddp_trainer.config import (
    AllReduceConfig,
    Bucket,
    CommHook,
    Config,
    ConfigError,
    DataParallelConfig,
    DDPConfig,
    LocalSGDConfig,
    ParameterServerConfig,
    ReplicasConfig,
    RingConfig,
    SyncConfig,
    require,
)
from ddp_trainer.costs import shapes_of, traffic
from ddp_trainer.distributed import World
from ddp_trainer.environment import read_environment
from ddp_trainer.start import start
from ddp_trainer.timeline import PHASES
from ddp_trainer.trainer import Trainer
from ddp_trainer.trial import Build, builder, take_steps

Tags = dict[str, float]


@dataclass(kw_only=True)
class Contestant:
    """One strategy: its trainer, where this process has one, and what was measured."""

    name: str
    config: Config
    world: World
    """The ranks that train: all of them, or this process alone."""
    trainer: Trainer | None
    steps: int = 0
    """Optimizer steps taken, warm-up included."""
    rounds: list[Tags] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    """Bytes per rank and step over the network, a value per round."""


def main() -> None:
    """Compose the config, measure, and exit as ``-m ddp_trainer`` does."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc_per_node=N -m ddp_trainer.benchmark", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--strategies", metavar="A,B", help="which; all that can run here unless given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a strategy in a round")
    arguments, sys.argv[1:] = parser.parse_known_args()
    for_each_job(lambda config, run_dir: compare(config, run_dir.with_name(f"benchmark-{run_dir.name}"), arguments))


def compare(config: Config, folder: Path, arguments: argparse.Namespace) -> None:
    """Measure all strategies on this config's model and data, and write what came of it into `folder`."""
    for key in ("rounds", "steps"):
        require(getattr(arguments, key) >= 1, f"--{key}={getattr(arguments, key)} must be at least 1")
    environment = read_environment()
    with ExitStack() as stack:
        config, world, splits = start(config, environment, stack)
        syncs = chosen(strategies(world), arguments.strategies)
        build = builder(stack, splits=splits, folder=folder, environment=environment)
        contestants = [contestant(name, its, world, build) for name, its in combined(config, syncs).items()]
        for number in range(-1, arguments.rounds):  # the first is thrown away
            for offset in range(len(contestants)):
                measure(contestants[(number + offset) % len(contestants)], world, steps=arguments.steps)
        if world.is_main:
            report(contestants, config, world, folder)
        del contestants, build  # no DDP module may outlive the process group


def strategies(world: World) -> dict[str, SyncConfig]:
    """Return what can run on `world`, by the names it goes by in the table."""
    compressed = {f"ddp, {hook.name} hook": DDPConfig(comm_hook=hook) for hook in (CommHook.bf16, CommHook.fp16)}
    kind, size = world.device.type, world.world_size
    devices = ["cpu"] * size if kind == "cpu" else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    found: dict[str, SyncConfig] = {
        "ddp": DDPConfig(),
        **compressed,
        "ddp, powersgd": DDPConfig(comm_hook=CommHook.powersgd, powersgd_warmup_steps=2),
        "allreduce, flat": AllReduceConfig(),
        "allreduce, parameter": AllReduceConfig(bucket=Bucket.parameter),
        "local_sgd": LocalSGDConfig(),
        "replicas": ReplicasConfig(devices=devices),
    }
    if kind == "cpu" or world.backend == "nccl":
        found["ring"] = RingConfig()
        found["parameter_server, 1"] = ParameterServerConfig()
        if size > 1:
            found[f"parameter_server, {size}"] = ParameterServerConfig(num_servers=size)
    if kind == "cuda" and len(devices) > 1:
        found["data_parallel"] = DataParallelConfig()
    return found


def combined(config: Config, syncs: dict[str, SyncConfig]) -> dict[str, Config]:
    """Return `config` with each of `syncs`, but for those that its other keys rule out: a server in fp16, say."""
    found = {}
    for name, sync in syncs.items():
        with suppress(ConfigError):
            found[name] = replace(config, sync=sync)
    require(bool(found), "--strategies names none that goes with the other keys")
    return found


def chosen(found: dict[str, SyncConfig], names: str | None) -> dict[str, SyncConfig]:
    """Return those of `found` whose name, or whose sync, is among `names`.

    Raises:
        ConfigError: one of the names is neither.
    """
    if names is None:
        return found
    wanted = names.split(",")
    for name in wanted:
        known = sorted({sync.name for sync in found.values()})
        require(name in known, f"--strategies={name} cannot be compared here: choose of {', '.join(known)}")
    return {name: sync for name, sync in found.items() if sync.name in wanted}


# --- measuring --------------------------------------------------------------------------------


def contestant(name: str, config: Config, world: World, build: Build) -> Contestant:
    """Build the trainer of one strategy on the ranks that it is for."""
    if isinstance(config.sync, ReplicasConfig | DataParallelConfig):
        alone = replace(
            world, rank=0, world_size=1, local_rank=0, local_world_size=1,
            num_threads=world.num_threads * world.world_size,
        )  # fmt: skip
        trainer = build(config, alone) if world.is_main else None
        return Contestant(name=name, config=config, world=alone, trainer=trainer)
    return Contestant(name=name, config=config, world=world, trainer=build(config, world))


def measure(subject: Contestant, world: World, *, steps: int) -> None:
    """Let one strategy take some steps, all ranks beginning at once. Collective: every rank must call this."""
    if subject.steps == 0 and subject.trainer is not None:
        subject.trainer.warm_up()
    world.gather(None)
    before = sent_bytes()
    if subject.trainer is not None:
        torch.set_num_threads(subject.world.num_threads)
        tags = take_steps(subject.trainer, steps)
        torch.set_num_threads(world.num_threads)
        if subject.steps:
            subject.rounds.append(tags)
    by_node = [
        sent for sent in world.gather(sent_bytes() - before if world.local_rank == 0 else None) if sent is not None
    ]
    if subject.steps:
        subject.sent.append(sum(by_node) / world.world_size / steps)
    subject.steps += steps


def sent_bytes() -> int:
    """Return how many bytes this host (or network namespace) has sent, over all its interfaces."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    except OSError:  # not Linux
        return 0
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


# --- telling ----------------------------------------------------------------------------------


def report(contestants: list[Contestant], config: Config, world: World, folder: Path) -> None:
    """Print the table, and write it as JSON and as a picture."""
    rows = [row(subject, contestants[0]) for subject in contestants]
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    about = {
        "model": config.model.name, "data": config.data.name, "global_batch_size": config.global_batch_size,
        "precision": config.precision.name, "world_size": world.world_size, "device": device or world.device.type,
        "backend": world.backend, "torch": torch.__version__, "threads_per_rank": world.num_threads,
        "config": to_builtins(config),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "benchmark.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(rows, title=f"{about['model']}, {about['data']}, {world.world_size} ranks, {world.backend}"))
    console.print(f"written: {folder / 'benchmark.json'}")
    try:
        picture = draw(rows, about, folder / "benchmark.png")
    except ModuleNotFoundError:
        console.print("no picture: pip install matplotlib draws one")
    else:
        console.print(f"written: {picture}")


def row(subject: Contestant, base: Contestant) -> dict[str, Any]:
    """Return what one strategy came to, medians over rounds."""
    trainer = subject.trainer
    assert trainer is not None
    textbook = traffic(
        subject.config.sync,
        shapes_of(trainer.model),
        world_size=subject.world.world_size,
        optimizer_slots=subject.config.optimizer.state_tensors,
    )
    rates = [tags["throughput/images_per_second"] for tags in subject.rounds]
    ratios = [
        tags["time/step_ms"] / mine["time/step_ms"] for mine, tags in zip(subject.rounds, base.rounds, strict=True)
    ]
    phases = {name: statistics.median(tags[f"time/{name}_ms"] for tags in subject.rounds) for name in PHASES.values()}
    return {
        "name": subject.name,
        "images_per_second": statistics.median(rates),
        "images_per_second_all": rates,
        "step_ms": statistics.median(tags["time/step_ms"] for tags in subject.rounds),
        "phases_ms": phases,
        "relative": statistics.median(ratios),
        "relative_least": min(ratios),
        "relative_most": max(ratios),
        "sent_bytes": statistics.median(subject.sent),
        "textbook_sent_bytes": textbook.sent_per_rank,
        "textbook_busiest_bytes": textbook.busiest,
    }


def table(rows: list[dict[str, Any]], *, title: str) -> Table:
    """Return the comparison for a terminal."""
    headers = ("img/s", "× ddp", "spread", "step ms", "data", "fwd/bwd", "exposed comm", "optimizer",
               "sent MB", "textbook", "busiest")  # fmt: skip
    found = Table("sync", *headers, title=title, caption="MB per rank and step; busiest: in and out of one rank")
    for column in found.columns[1:]:
        column.justify = "right"
    for entry in rows:
        phases = entry["phases_ms"]
        found.add_row(
            entry["name"],
            f"{entry['images_per_second']:,.0f}",
            f"{entry['relative']:.2f}",
            f"{entry['relative_least']:.2f}–{entry['relative_most']:.2f}",
            f"{entry['step_ms']:.1f}",
            *(f"{phases[name]:.1f}" for name in ("data_wait", "forward_backward", "communication", "optimizer")),
            *(f"{entry[key] / 1e6:.2f}" for key in ("sent_bytes", "textbook_sent_bytes", "textbook_busiest_bytes")),
        )
    return found


def draw(rows: list[dict[str, Any]], about: dict[str, Any], path: Path) -> Path:
    """Draw images per second and the timeline of a step, a bar a strategy.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl  # an extra: only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [entry["name"] for entry in rows][::-1]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 1.6 + 0.38 * len(rows)), sharey=True, layout="constrained")
    rates = [entry["images_per_second"] for entry in rows][::-1]
    spread = [
        [rate - min(entry["images_per_second_all"]) for rate, entry in zip(rates, rows[::-1], strict=True)],
        [max(entry["images_per_second_all"]) - rate for rate, entry in zip(rates, rows[::-1], strict=True)],
    ]
    bars = left.barh(names, rates, xerr=spread, color="#4477aa", ecolor="#333333", capsize=2)
    left.bar_label(bars, [f"{entry['relative']:.2f} × ddp" for entry in rows][::-1], padding=8, fontsize=8)
    left.set(xlabel="images per second (median and range of the rounds)", xlim=(0, 1.3 * max(rates)))
    begin = [0.0] * len(rows)
    colours = ("#bbbbbb", "#4477aa", "#ee6677", "#ccbb44", "#dddddd")
    labels = ("waiting for data", "forward and backward", "exposed communication", "optimizer", "other")
    for phase, colour, label in zip(PHASES.values(), colours, labels, strict=True):
        lengths = [entry["phases_ms"][phase] for entry in rows][::-1]
        right.barh(names, lengths, left=begin, color=colour, label=label)
        begin = [start + length for start, length in zip(begin, lengths, strict=True)]
    right.set(xlabel="milliseconds of a step")
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=len(labels))
    figure.suptitle(
        f"{about['model']} on {about['data']}, {about['world_size']} ranks of {about['threads_per_rank']} thread(s), "
        f"{about['backend']}, {about['precision']}, global batch {about['global_batch_size']}"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
