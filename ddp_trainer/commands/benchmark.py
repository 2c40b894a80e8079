"""Compare the synchronization strategies on one model, data set and seed:

    torchrun --nproc_per_node=2 -m ddp_trainer benchmark model=lenet data=fashion_mnist

Compares the strategies that the option strategies lists, or else all strategies that can run here,
including those of plug-ins. Prints a table, and writes the results to
<output_dir>/benchmark-<name>/benchmark.json.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from ddp_trainer import registry
from ddp_trainer.commands.command_line import run_command
from ddp_trainer.commands.results import print_numbers, write_results
from ddp_trainer.config.errors import POSITIVE, config_class, require, setting
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.runtime import disable_gc

PHASES = {
    "data_wait": "data",
    "forward_backward": "fwd/bwd",
    "communication": "exposed comm",
    "optimizer": "optimizer",
    "other": "other",
}
"""The column heading of each phase of a step, by the tag of the phase."""


@config_class
class BenchmarkOptions:
    """The options of the command."""

    rounds: int = setting(5, POSITIVE)
    """Number of rounds; each round measures every strategy once."""
    steps: int = setting(20, POSITIVE)
    """Optimizer steps of each strategy per round."""
    strategies: list[str] = setting([])
    """Choices of sync to compare, such as ddp,ring; []: all strategies that can run here."""

    def __post_init__(self) -> None:
        known = registry.choices("sync")
        for name in self.strategies:
            require(
                name in known,
                f"strategies={name} is not a valid choice: choose from {', '.join(known)}",
            )


def main(words: Sequence[str]) -> None:
    """Run the command; exit with 2 for wrong input, with 1 for any other failure."""
    run_command(benchmark, BenchmarkOptions, words, description=__doc__)


def benchmark(config: Config, run_dir: Path, options: BenchmarkOptions) -> None:
    """Measure the strategies; on rank 0, print and write the results. Collective."""
    with disable_gc():
        from ddp_trainer.start import set_up
        from ddp_trainer.tools.step_benchmark import compare_strategies  # imports torch
    with ExitStack() as stack:
        setup = set_up(config, read_environment(), stack)
        result = compare_strategies(
            setup, rounds=options.rounds, steps=options.steps, names=options.strategies
        )
    if result is not None:
        print_numbers(to_table(result))
        for reason in dict.fromkeys(result["left_out"].values()):
            print(f"left out: {reason}")
        write_results(result, run_dir, name="benchmark")


def to_table(result: dict[str, Any]) -> Table:
    """Return a table with one row per strategy. result: see `compare_strategies`."""
    rows = result["rows"]
    ratio = f"× {rows[0]['name']}"
    headers = ("sync", "img/s", "step ms", ratio, "min–max", *PHASES.values())
    table = Table(*headers, title=result["title"], caption="phases: milliseconds of a step")
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['images_per_second']:,.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['relative']:.2f}",
            f"{row['relative_min']:.2f}–{row['relative_max']:.2f}",
            *(f"{row['phases_ms'][phase]:.1f}" for phase in PHASES),
        )
    return table
