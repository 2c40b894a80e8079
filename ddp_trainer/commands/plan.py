"""Predict the step time of each strategy (choice of sync) on more ranks than are available here:

    torchrun --nproc_per_node=2 -m ddp_trainer plan model=resnet18 data=fashion_mnist
    python -m ddp_trainer plan bandwidth_mbit=1000 latency_us=100 model=resnet18

Measures the time that a rank computes in a step, and the latency and bandwidth of the process group
unless both are given as options. A cost model predicts from these numbers the step time and the
efficiency (1 is linear scaling), and the smallest batch per rank whose forward and backward last at
least as long as the all-reduce: a smaller batch cannot hide the all-reduce. Prints a table, and
writes plan.json to <output_dir>/plan-<name> (values of these config keys).
"""

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from ddp_trainer import registry
from ddp_trainer.commands.command_line import run_command
from ddp_trainer.commands.results import print_table, writing
from ddp_trainer.config.errors import NOT_NEGATIVE, POSITIVE, require, setting
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.runtime import disable_gc
from ddp_trainer.tools.costs import VARIANTS, Compute, Network, predict, smallest_hiding_batch


@dataclass(kw_only=True, slots=True)
class PlanOptions:
    """The options of the command."""

    ranks: str = "1,2,4,8,16,64,256,1024,4096"
    """Numbers of ranks for which the step time is predicted."""
    bandwidth_mbit: float | None = setting(None, POSITIVE)
    """Bandwidth of the network in each direction, in Mbit/s; null: measured."""
    latency_us: float | None = setting(None, NOT_NEGATIVE)
    """Latency of the network, in microseconds; null: measured."""
    steps: int = setting(10, POSITIVE)
    """Optimizer steps per measurement."""

    def __post_init__(self) -> None:
        require(
            (self.bandwidth_mbit is None) == (self.latency_us is None),
            "bandwidth_mbit and latency_us must be given together: set both, or neither",
        )
        require(
            re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.ranks) is not None,
            f"ranks={self.ranks} must be whole numbers of at least 1, such as 1,2,4",
        )

    @property
    def counts(self) -> list[int]:
        """The numbers of ranks, each once and in order."""
        return sorted({int(count) for count in self.ranks.split(",")})


def main(words: Sequence[str]) -> None:
    """Predict step times from measurements of this job."""
    run_command(plan, PlanOptions, words, description=__doc__)


def plan(config: Config, run_dir: Path, options: PlanOptions) -> None:
    """Measure this job; on rank 0, print and write the predicted step times. Collective."""
    environment = read_environment()
    latency_us = options.latency_us
    bandwidth_mbit = options.bandwidth_mbit
    require(
        latency_us is not None or environment.world_size > 1,
        "a single rank has no network to measure: start with torchrun --nproc_per_node=2, or set"
        " bandwidth_mbit and latency_us",
    )
    # half of the batch is measured too, and BatchNorm may need 2 images in a pass
    least = 4 * environment.world_size * config.gradient_accumulation_steps
    require(
        config.global_batch_size >= least,
        f"global_batch_size={config.global_batch_size} must be at least {least}: 4 images per rank"
        " and pass",
    )
    with disable_gc():
        from ddp_trainer.start import start  # imports torch
        from ddp_trainer.tools.step_benchmark import measure_compute, measure_network
    with ExitStack() as stack:
        begun = start(config, environment, stack)
        compute = measure_compute(begun, steps=options.steps)
        if latency_us is None or bandwidth_mbit is None:
            network = measure_network(compute, begun.world)
        else:
            network = Network(latency=latency_us / 1e6, bandwidth=bandwidth_mbit * 1e6 / 8)
    if environment.rank == 0:
        folder = run_dir.with_name(f"plan-{run_dir.name}")
        report(config.model.name, compute, network, options.counts, folder)


def report(model: str, compute: Compute, network: Network, counts: list[int], folder: Path) -> None:
    """Predict the step times for the numbers of ranks `counts`; print and write them."""
    print(
        f"{model}: {compute.forward_backward * 1e3:.1f} ms forward and backward of {compute.batch}"
        f" images per rank, {compute.other * 1e3:.1f} ms for the rest of a step;"
        f" {compute.size / 1e6:.1f} MB of gradients; network {network.latency * 1e6:.0f} µs,"
        f" {network.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    table = Table(
        *("ranks", "all-reduce", "hidden from", *VARIANTS),
        title=(
            "predicted step time in milliseconds, and efficiency; the batch per rank stays the same"
        ),
        caption=(
            "all-reduce: milliseconds; hidden from: smallest batch per rank whose computation lasts"
            " as long"
        ),
    )
    predictions = []
    for count in counts:
        row = [predict(strategy, compute, network, count) for strategy in VARIANTS]
        predictions += row
        batch = smallest_hiding_batch(compute, network, count)
        table.add_row(
            f"{count:,}",
            f"{network.all_reduce(compute.size, count) * 1e3:,.1f}",
            "no batch" if batch is None else f"{batch:,}",
            *(
                f"{prediction['step'] * 1e3:,.1f} {prediction['efficiency']:5.0%}"
                for prediction in row
            ),
        )
    print_table(table)
    known = {config.name for config in VARIANTS.values()}
    unknown = [
        choice.name
        for choice in registry.choices("sync").values()
        if choice.name not in known and not choice.schema.single_process
    ]
    print(f"not predicted: sync={', '.join(unknown)}")
    content = {"compute": asdict(compute), "network": asdict(network), "predictions": predictions}
    with writing(path := folder / "plan.json"):
        path.write_text(json.dumps(content, indent=1) + "\n")
