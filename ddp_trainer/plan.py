"""How many ranks pay off? The notes' t1 and t2, measured here, for more ranks than are here.

    torchrun --nproc_per_node=2 -m ddp_trainer.plan model=resnet18 data=fashion_mnist
    python -m ddp_trainer.plan --bandwidth-mbit=1000 --latency-us=100 model=resnet18

Measures what a step computes (t1: forward, backward and optimizer, at two batch sizes, and when each gradient is ready)
and what messages cost (t2: latency and bandwidth of the process group, unless both are given). From these and nothing
else `ddp_trainer.prediction` tells the step of each strategy on any number of ranks, the efficiency, and the smallest
share of a batch at which communication hides behind backward. Prints a table; writes plan.json and plan.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ddp_trainer.command_line import for_each_job
from ddp_trainer.config import Config, DDPConfig, NoSyncConfig, require
from ddp_trainer.costs import shapes_of
from ddp_trainer.distributed import World
from ddp_trainer.environment import read_environment
from ddp_trainer.prediction import HOOKS, STRATEGIES, Compute, Network, Prediction, predict, smallest_hiding_batch
from ddp_trainer.start import start
from ddp_trainer.sync.base import flatten, unflatten
from ddp_trainer.sync.ddp import DDPSync
from ddp_trainer.sync.ring import pass_on
from ddp_trainer.trainer import Trainer
from ddp_trainer.trial import builder, take_steps

# --- measuring --------------------------------------------------------------------------------


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
        optimizer=seconds(tags[0], "optimizer"),
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
            trainer.replica = bare  # and the DDP module is gone
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


# --- the command ------------------------------------------------------------------------------


def main() -> None:
    """Measure, predict, tell."""
    parser = argparse.ArgumentParser(prog="python -m ddp_trainer.plan", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", default="1,2,4,8,16,64,256,1024,4096", metavar="A,B", help="how many to plan for")
    parser.add_argument("--bandwidth-mbit", type=float, help="of the network, in each direction; measured if not given")
    parser.add_argument("--latency-us", type=float, help="of the network; measured if not given")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a measurement")
    arguments, sys.argv[1:] = parser.parse_known_args()
    for_each_job(lambda config, run_dir: plan(config, run_dir.with_name(f"plan-{run_dir.name}"), arguments))


def plan(config: Config, folder: Path, arguments: argparse.Namespace) -> None:
    """Measure on the ranks that there are, and predict for those asked for."""
    environment = read_environment()
    given = (arguments.bandwidth_mbit, arguments.latency_us)
    require(
        (given[0] is None) == (given[1] is None), "--bandwidth-mbit and --latency-us are given together, or neither"
    )
    require(
        given[0] is not None or environment.world_size > 1,
        "one rank alone has no network to measure: start torchrun --nproc_per_node=2, or give --bandwidth-mbit and "
        "--latency-us",
    )
    counts = parse_counts(arguments.ranks)
    config.check_world_size(environment.world_size)
    share = config.global_batch_size // environment.world_size
    require(share >= 2, f"global_batch_size={config.global_batch_size} gives a rank {share} images: two are needed")
    with ExitStack() as stack:
        config, world, splits = start(config, environment, stack)
        build = builder(stack, splits=splits, folder=folder, environment=environment)
        alone = replace(world, rank=0, world_size=1, local_rank=0, local_world_size=1)
        subjects = [
            build(replace(config, sync=NoSyncConfig(), global_batch_size=batch), alone) for batch in (share, share // 2)
        ]
        compute = measure_compute(subjects[0], subjects[1], steps=arguments.steps)
        if given[0] is None:
            network = measure_network(world, compute, subjects[0])
        else:
            network = Network.given(latency=given[1] / 1e6, bandwidth=given[0] * 1e6 / 8)
        if world.is_main:
            report(compute, network, counts, config, folder)


def parse_counts(text: str) -> list[int]:
    """Return the numbers of ranks in ``1,2,4``.

    Raises:
        ConfigError: they are none.
    """
    counts = text.split(",")
    require(all(count.isdecimal() and int(count) > 0 for count in counts), f"--ranks={text} must be numbers from 1 on")
    return [int(count) for count in counts]


def report(compute: Compute, network: Network, counts: list[int], config: Config, folder: Path) -> None:
    """Print the table; write the measurements and predictions as JSON, and the picture."""
    ddp = config.sync if isinstance(config.sync, DDPConfig) else DDPConfig()
    cap = ddp.cap_mb(compute.size)
    found = [
        predict(strategy, compute, network, count, bucket_cap_mb=cap) for strategy in STRATEGIES for count in counts
    ]
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(
        f"{config.model.name}: t1 = {compute.forward_backward * 1e3:.1f} ms forward and backward of {compute.batch} "
        f"images a rank, {compute.rest * 1e3:.1f} ms besides; {compute.size / 1e6:.1f} MB of gradients; network "
        f"{network.latency * 1e6:.0f} µs, {network.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    console.print(table(found, counts))
    for count in [count for count in counts if count > 1]:
        batch = smallest_hiding_batch(compute, network, count)
        shown = "no batch" if batch is None else f"{batch:,} images a rank"
        console.print(
            f"{count} ranks: t1 ≥ t2 = {network.all_reduce(compute.size, count) * 1e3:.1f} ms from {shown} on"
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = {"compute": asdict(compute), "network": asdict(network), "predictions": [asdict(one) for one in found]}
    (folder / "plan.json").write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: {folder / 'plan.json'}")
    try:
        console.print(f"written: {draw(found, config, compute, folder / 'plan.png')}")
    except ModuleNotFoundError:
        console.print("no picture: pip install matplotlib draws one")


def table(found: list[Prediction], counts: list[int]) -> Table:
    """Return step time and efficiency, a line a number of ranks."""
    shown = Table(
        "ranks", *STRATEGIES, title="predicted milliseconds a step, and efficiency; the share of a rank fixed"
    )
    by_key = {(one.strategy, one.world_size): one for one in found}
    for column in shown.columns:
        column.justify = "right"
    for count in counts:
        cells = [by_key[strategy, count] for strategy in STRATEGIES]
        shown.add_row(f"{count:,}", *(f"{one.step * 1e3:,.1f} {one.efficiency:5.0%}" for one in cells))
    return shown


def draw(found: list[Prediction], config: Config, compute: Compute, path: Path) -> Path:
    """Draw efficiency against the number of ranks.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl  # an extra: only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for strategy in STRATEGIES:
        points = [(one.world_size, one.efficiency) for one in found if one.strategy == strategy]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=strategy)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="ranks", ylabel="efficiency (1: linear scaling)", ylim=(0, 1.05),
        title=f"{config.model.name}, {compute.batch} images a rank, predicted",
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
