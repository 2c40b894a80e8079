"""Predict the step time of most choices of sync for any number of ranks:

    torchrun --nproc_per_node=2 -m ddp_trainer plan model=resnet18 data=fashion_mnist
    python -m ddp_trainer plan bandwidth_mbit=1000 latency_us=100 model=resnet18

Measures the compute time of a rank in a step, and the latency and bandwidth of the process group
unless both are given as options. From these numbers, a cost model predicts the step time and the
efficiency (1 is linear scaling). It also predicts the smallest batch per rank whose forward and
backward last at least as long as the all-reduce, because a smaller batch cannot hide the
all-reduce. Prints a table, and writes <output_dir>/plan-<name>/plan.json.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from rich.table import Table

from ddp_trainer.commands.command_line import run_command
from ddp_trainer.commands.results import print_numbers, write_results
from ddp_trainer.config.errors import (
    NOT_NEGATIVE,
    POSITIVE,
    ConfigError,
    config_class,
    require,
    rule,
    setting,
)
from ddp_trainer.config.schema import Config
from ddp_trainer.config.sync import PipelineConfig, SyncConfig
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.runtime import disable_gc
from ddp_trainer.tools.costs import (
    PREDICTED,
    Compute,
    Network,
    exposed_seconds,
    smallest_hiding_batch,
)


@config_class
class PlanOptions:
    """The options of the command."""

    ranks: list[int] = setting(
        [1, 2, 4, 8, 16, 64, 256, 1024, 4096],
        rule("whole numbers of at least 1", lambda ranks: min(ranks, default=0) > 0),
    )
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

    @property
    def network(self) -> Network | None:
        """The network that the options describe; None: the network is measured."""
        if self.bandwidth_mbit is None or self.latency_us is None:
            return None
        return Network(latency=self.latency_us / 1e6, bandwidth=self.bandwidth_mbit * 1e6 / 8)


def main(words: Sequence[str]) -> None:
    """Run the command; exit with 2 for wrong input, with 1 for any other failure."""
    run_command(plan, PlanOptions, words, description=__doc__)


def plan(config: Config, run_dir: Path, options: PlanOptions) -> None:
    """Measure this job; on rank 0, print and write the predicted step times. Collective.

    Raises:
        ConfigError: the network is not given, and a single rank cannot measure it.
    """
    environment = read_environment()
    require(
        options.network is not None or environment.world_size > 1,
        "a single rank has no network to measure: start with torchrun --nproc_per_node=2, or set"
        " bandwidth_mbit and latency_us",
    )
    with disable_gc():
        from ddp_trainer.start import set_up  # imports torch
        from ddp_trainer.tools.step_benchmark import measure_compute, measure_network
    with ExitStack() as stack:
        setup = set_up(config, environment, stack)
        compute = measure_compute(setup, steps=options.steps)
        network = options.network or measure_network(setup.world)
    if environment.rank == 0:
        rows = [predict(compute, network, count) for count in sorted(set(options.ranks))]
        print_plan(config.model.name, compute, network, rows)
        content = {
            "compute": compute._asdict(),
            "network": network._asdict(),
            "predictions": list(chain.from_iterable(rows)),
        }
        write_results(content, run_dir, name="plan")


def predict(compute: Compute, network: Network, world_size: int) -> list[dict[str, Any]]:
    """Return the row of `world_size`: for each strategy that can run on it, the predictions.

    "step" is the step time in seconds. "efficiency" is the step time of a single rank divided by
    "step".
    """
    alone = compute.forward_backward + compute.other
    steps = {
        name: alone + exposed_seconds(config, compute, network, world_size)
        for name, config in PREDICTED.items()
        if can_run(config, compute, world_size)
    }
    return [
        {"strategy": name, "world_size": world_size, "step": step, "efficiency": alone / step}
        for name, step in steps.items()
    ]


def can_run(config: SyncConfig, compute: Compute, world_size: int) -> bool:
    """Return whether a strategy can run this model on `world_size` ranks."""
    try:
        config.check_world_size(world_size)
    except ConfigError:
        return False
    return not isinstance(config, PipelineConfig) or compute.activations.largest_share < 1


def print_plan(
    model: str, compute: Compute, network: Network, rows: list[list[dict[str, Any]]]
) -> None:
    """Print the measurements, and a table of the predictions. rows: results of `predict`."""
    print(
        f"{model}: {compute.forward_backward * 1e3:.1f} ms forward and backward of {compute.batch}"
        f" images per rank, {compute.other * 1e3:.1f} ms for the rest of a step;"
        f" {compute.gradient_bytes / 1e6:.1f} MB of gradients; network"
        f" {network.latency * 1e6:.0f} µs, {network.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    table = Table(
        *("ranks", "all-reduce", "min. batch", *PREDICTED),
        title="predicted step time in ms, and efficiency; the batch per rank stays the same",
        caption="all-reduce: its time in ms; min. batch: the smallest batch per rank whose forward"
        " and backward last at least as long as the all-reduce",
    )
    for row in rows:
        count = row[0]["world_size"]
        steps = {
            entry["strategy"]: f"{entry['step'] * 1e3:,.1f} {entry['efficiency']:5.0%}"
            for entry in row
        }
        table.add_row(
            f"{count:,}",
            f"{network.all_reduce(compute.gradient_bytes, count) * 1e3:,.1f}",
            f"{smallest_hiding_batch(compute, network, count):,}",
            *(steps.get(name, "–") for name in PREDICTED),
        )
    print_numbers(table)
