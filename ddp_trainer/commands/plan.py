"""Predict the step time of ddp, allreduce, ring and parameter_server on more ranks than there are:

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
from typing import Any

from rich.table import Table

from ddp_trainer.commands.command_line import run_command
from ddp_trainer.commands.results import print_table, writing
from ddp_trainer.config.errors import NOT_NEGATIVE, POSITIVE, require, setting
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.runtime import disable_gc
from ddp_trainer.tools.costs import (
    PREDICTED,
    Compute,
    Network,
    exposed_seconds,
    smallest_hiding_batch,
)


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
    with disable_gc():
        from ddp_trainer.start import start  # imports torch
        from ddp_trainer.tools.step_benchmark import measure_compute, measure_network
    with ExitStack() as stack:
        begun = start(config, environment, stack)
        compute = measure_compute(begun, steps=options.steps)
        if latency_us is None or bandwidth_mbit is None:
            network = measure_network(begun.world)
        else:
            network = Network(latency=latency_us / 1e6, bandwidth=bandwidth_mbit * 1e6 / 8)
    if environment.rank == 0:
        print_plan(config.model.name, compute, network, options.counts)
        content = {
            "compute": asdict(compute),
            "network": asdict(network),
            "predictions": [
                entry for count in options.counts for entry in predict(compute, network, count)
            ],
        }
        path = run_dir.with_name(f"plan-{run_dir.name}") / "plan.json"
        with writing(path):
            path.write_text(json.dumps(content, indent=1) + "\n")


def predict(compute: Compute, network: Network, world_size: int) -> list[dict[str, Any]]:
    """Return the predicted step time of each strategy in seconds, and its efficiency.

    The efficiency is the time of a single rank's step divided by that of this step.
    """
    alone = compute.forward_backward + compute.other
    entries = []
    for name, config in PREDICTED.items():
        step = alone + exposed_seconds(config, compute, network, world_size)
        entries.append(
            {"strategy": name, "world_size": world_size, "step": step, "efficiency": alone / step}
        )
    return entries


def print_plan(model: str, compute: Compute, network: Network, counts: list[int]) -> None:
    """Print the measurements, and a table of step times with a row for each number of ranks."""
    print(
        f"{model}: {compute.forward_backward * 1e3:.1f} ms forward and backward of {compute.batch}"
        f" images per rank, {compute.other * 1e3:.1f} ms for the rest of a step;"
        f" {compute.gradient_bytes / 1e6:.1f} MB of gradients; network"
        f" {network.latency * 1e6:.0f} µs, {network.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    table = Table(
        *("ranks", "all-reduce", "hidden from", *PREDICTED),
        title="predicted step time in ms, and efficiency; the batch per rank stays the same",
        caption="all-reduce: ms; hidden from: the smallest batch per rank that computes as long",
    )
    for count in counts:
        steps = [
            f"{entry['step'] * 1e3:,.1f} {entry['efficiency']:5.0%}"
            for entry in predict(compute, network, count)
        ]
        table.add_row(
            f"{count:,}",
            f"{network.all_reduce(compute.gradient_bytes, count) * 1e3:,.1f}",
            f"{smallest_hiding_batch(compute, network, count):,}",
            *steps,
        )
    print_table(table)
