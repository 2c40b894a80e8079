"""Predict the step time of each strategy on more ranks than there are here:

    torchrun --nproc_per_node=2 -m ddp_trainer plan model=resnet18 data=fashion_mnist
    python -m ddp_trainer plan bandwidth_mbit=1000 latency_us=100 model=resnet18

Measures the time that a rank computes in a step, and the latency and bandwidth of the process group unless both are
given. From these alone a model predicts the step time, the efficiency, and the smallest batch per rank with which
communication can overlap with backward entirely. Prints a table, and writes plan.json and plan.png to
<output_dir>/plan-<name>.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ddp_trainer.commands.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.commands.options import parse_options, print_help, program, wants_help
from ddp_trainer.commands.results import print_table, write_results
from ddp_trainer.config.errors import require, require_positive
from ddp_trainer.config.schema import Config
from ddp_trainer.config.sync import DDPConfig
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.memory import disable_gc
from ddp_trainer.performance.step_time_model import (
    STRATEGIES,
    Compute,
    Network,
    Prediction,
    predict,
    smallest_hiding_batch,
)


@dataclass(kw_only=True, slots=True)
class PlanOptions:
    """The options of the command."""

    ranks: str = "1,2,4,8,16,64,256,1024,4096"
    """Numbers of ranks to predict for."""
    bandwidth_mbit: float | None = None
    """Of the network, in each direction; null: measured."""
    latency_us: float | None = None
    """Of the network; null: measured."""
    steps: int = 10
    """Optimizer steps of a measurement."""

    def __post_init__(self) -> None:
        require_positive("steps", self.steps)
        require_positive("bandwidth_mbit", self.bandwidth_mbit)
        require(self.latency_us is None or self.latency_us >= 0, f"latency_us={self.latency_us} must be at least 0")
        require(
            (self.bandwidth_mbit is None) == (self.latency_us is None),
            "bandwidth_mbit and latency_us must be given together, or neither of them",
        )
        require(
            all(count.isdecimal() and int(count) > 0 for count in self.ranks.split(",")),
            f"ranks={self.ranks} must be whole numbers of at least 1, such as 1,2,4",
        )

    @property
    def counts(self) -> list[int]:
        """The numbers of ranks, in ascending order."""
        return sorted({int(count) for count in self.ranks.split(",")})

    @property
    def network(self) -> Network | None:
        """The network that is given, if any."""
        if self.bandwidth_mbit is None or self.latency_us is None:
            return None
        latency, bandwidth = self.latency_us / 1e6, self.bandwidth_mbit * 1e6 / 8
        return Network(latency=latency, bandwidth=bandwidth, pair_latency=latency, pair_bandwidth=bandwidth)


def main(words: Sequence[str]) -> None:
    """Measure, predict and report, and exit with 0, 2 for the user's input, or 1."""
    if wants_help(words):
        print_help(f"{program()} plan [option=value …] [key=value …]", __doc__ or "", PlanOptions)
        return
    with errors_as_exit_codes():
        options, overrides = parse_options(PlanOptions, words)
    for_each_job(lambda config, run_dir: plan(config, run_dir, options), overrides)


def plan(config: Config, run_dir: Path, options: PlanOptions) -> None:
    """Measure on the ranks that there are, and predict for the others on rank 0. Collective."""
    environment = read_environment()
    world_size = environment.world_size
    require(
        options.network is not None or world_size > 1,
        "a single rank has no network to measure: start torchrun --nproc_per_node=2, or set bandwidth_mbit and "
        "latency_us",
    )
    require(
        config.global_batch_size >= 2 * world_size,
        f"global_batch_size={config.global_batch_size} must be at least {2 * world_size}, 2 images per rank",
    )
    with disable_gc():
        from ddp_trainer.commands.calibration import calibrate  # imports torch
        from ddp_trainer.training.start import start
    with ExitStack() as stack:
        begun = start(config, environment, stack)
        result = calibrate(begun, network=options.network, steps=options.steps)
    if result is not None:
        compute, network = result
        bucket_cap = config.sync.bucket_cap_mb if isinstance(config.sync, DDPConfig) else "auto"
        predictions = predict_all(compute, network, options.counts, DDPConfig(bucket_cap_mb=bucket_cap))
        print_prediction(config.model.name, compute, network, predictions, options.counts)
        folder = run_dir.with_name(f"plan-{run_dir.name}")
        content = {
            "compute": asdict(compute),
            "network": asdict(network),
            "predictions": [asdict(prediction) for prediction in predictions],
        }
        title = f"{config.model.name}, {compute.batch} images per rank, predicted"
        write_results(folder / "plan", content, lambda figure: draw(predictions, title, figure))


def predict_all(compute: Compute, network: Network, counts: list[int], ddp: DDPConfig) -> list[Prediction]:
    """Return the prediction of each strategy on each number of ranks; `ddp` has the size of the buckets."""
    cap_mb = ddp.cap_mb(compute.size)
    return [
        predict(strategy, compute, network, count, bucket_cap_mb=cap_mb) for strategy in STRATEGIES for count in counts
    ]


def print_prediction(
    model: str, compute: Compute, network: Network, predictions: list[Prediction], counts: list[int]
) -> None:
    """Print the measurements and the predictions."""
    print(
        f"{model}: {compute.forward_backward * 1e3:.1f} ms forward and backward of {compute.batch} images "
        f"per rank, {compute.other * 1e3:.1f} ms for the rest of a step; {compute.size / 1e6:.1f} MB of gradients; "
        f"network {network.latency * 1e6:.0f} µs, {network.bandwidth * 8 / 1e6:,.0f} Mbit/s"
    )
    print_table(to_table(predictions, counts))
    for count in [count for count in counts if count > 1]:
        batch = smallest_hiding_batch(compute, network, count)
        needed = "not with any batch size" if batch is None else f"with {batch:,} or more images per rank"
        milliseconds = network.all_reduce(compute.size, count) * 1e3
        print(f"{count:,} ranks: all-reduce takes {milliseconds:.1f} ms, forward and backward as long {needed}")


def to_table(predictions: list[Prediction], counts: list[int]) -> Table:
    """Return step time and efficiency, one row for each number of ranks."""
    table = Table("ranks", *STRATEGIES, title="predicted step time in milliseconds, and efficiency; the batch per rank "
                  "stays the same")  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for count in counts:
        row = [p for p in predictions if p.world_size == count]  # in the order of STRATEGIES
        table.add_row(f"{count:,}", *(f"{p.step * 1e3:,.1f} {p.efficiency:5.0%}" for p in row))
    return table


def draw(predictions: list[Prediction], title: str, figure: Any) -> None:
    """Draw efficiency against the number of ranks."""
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    for strategy in STRATEGIES:
        points = [(p.world_size, p.efficiency) for p in predictions if p.strategy == strategy]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=strategy)
    counts = sorted({p.world_size for p in predictions})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.set(xlabel="ranks", ylabel="efficiency (1: linear scaling)", ylim=(0, 1.05), title=title)
    axes.legend(fontsize=8)
