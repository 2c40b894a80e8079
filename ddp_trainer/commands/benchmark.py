"""Compare the synchronisation strategies on one model, data set and seed:

    torchrun --nproc_per_node=2 -m ddp_trainer benchmark model=lenet data=fashion_mnist

Compares all strategies that can run here, also those of plug-ins. Prints a table, and writes
benchmark.json and benchmark.png to <output_dir>/benchmark-<name>.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ddp_trainer import registry
from ddp_trainer.commands.command_line import run_command
from ddp_trainer.commands.results import print_table, writing
from ddp_trainer.config.errors import POSITIVE, require, setting
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
"""The label of each phase of a step in the table and in benchmark.png."""


@dataclass(kw_only=True, slots=True)
class BenchmarkOptions:
    """The options of the command."""

    rounds: int = setting(5, POSITIVE)
    """Number of rounds; each round measures every strategy once."""
    steps: int = setting(20, POSITIVE)
    """Optimizer steps of each strategy per round."""
    strategies: str | None = None
    """Choices of sync to compare, such as ddp,ring; null: all strategies that can run here."""

    def __post_init__(self) -> None:
        known = registry.choices("sync")
        for name in self.names or ():
            require(
                name in known,
                f"strategies={name} is not a valid choice: choose from {', '.join(known)}",
            )

    @property
    def names(self) -> list[str] | None:
        """The names of the strategies to compare; None: all strategies that can run here."""
        return None if self.strategies is None else self.strategies.split(",")


def main(words: Sequence[str]) -> None:
    """Compare strategies and report; exit with 2 for wrong input, with 1 for any other failure."""
    run_command(benchmark, BenchmarkOptions, words, description=__doc__)


def benchmark(config: Config, run_dir: Path, options: BenchmarkOptions) -> None:
    """Measure the strategies; on rank 0, print and write the results. Collective."""
    with disable_gc():
        from ddp_trainer.start import start
        from ddp_trainer.tools.step_benchmark import compare_strategies  # imports torch
    with ExitStack() as stack:
        begun = start(config, read_environment(), stack)
        result = compare_strategies(
            begun, rounds=options.rounds, steps=options.steps, names=options.names
        )
    if result is not None:
        print_table(to_table(result))
        for reason in dict.fromkeys(result["left_out"].values()):
            print(f"left out: {reason}")
        path = run_dir.with_name(f"benchmark-{run_dir.name}") / "benchmark.json"
        with writing(path):
            path.write_text(json.dumps(result, indent=1) + "\n")
        draw(result, path.with_suffix(".png"))


def to_table(result: dict[str, Any]) -> Table:
    """Return the `result` of `compare_strategies` as a table with one row per strategy."""
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


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a chart of the phases of a step to `path` if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure  # an optional dependency
    except ModuleNotFoundError:
        print(
            "benchmark.png is not drawn, because matplotlib is missing: pip install"
            " 'ddp_trainer[plot]'"
        )
        return
    rows = result["rows"][::-1]  # the first strategy at the top
    names = [f"{row['name']}: {row['images_per_second']:,.0f} img/s" for row in rows]
    figure = Figure(layout="constrained", figsize=(10, 1.6 + 0.38 * len(rows)))
    axes = figure.subplots()
    starts = np.zeros(len(rows))
    for phase, label in PHASES.items():
        lengths = [row["phases_ms"][phase] for row in rows]
        axes.barh(names, lengths, left=starts, label=label)
        starts += lengths
    axes.set(xlabel="milliseconds per step", title=result["title"])
    figure.legend(loc="outside lower center", ncols=len(PHASES))
    with writing(path):
        figure.savefig(path, dpi=110)
