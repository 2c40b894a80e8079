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
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddp_trainer.calibration import measure_compute, measure_network
from ddp_trainer.command_line import for_each_job
from ddp_trainer.config import Config, DDPConfig, NoSyncConfig, require
from ddp_trainer.environment import read_environment
from ddp_trainer.prediction import STRATEGIES, Compute, Network, Prediction, predict, smallest_hiding_batch
from ddp_trainer.start import start
from ddp_trainer.trial import builder


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
    size = config.sync.bucket_cap_mb if isinstance(config.sync, DDPConfig) else "auto"
    cap = DDPConfig(bucket_cap_mb=size).cap_mb(compute.size)
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
