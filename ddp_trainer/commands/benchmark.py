"""Compare the synchronisation strategies on one model, data set and seed:

    torchrun --nproc_per_node=2 -m ddp_trainer benchmark model=lenet data=fashion_mnist

Every strategy that can run here takes part, those of plug-ins included. Prints a table, and writes benchmark.json and
benchmark.png to <output_dir>/benchmark-<name>.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ddp_trainer import registry
from ddp_trainer.commands.command_line import errors_as_exit_codes, for_each_job
from ddp_trainer.commands.options import parse_options, print_help, program, wants_help
from ddp_trainer.commands.results import print_table, write_results
from ddp_trainer.config.errors import require, require_positive
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.memory import disable_gc

PHASES = {
    "data_wait": ("waiting for data", "#bbbbbb"),
    "forward_backward": ("forward and backward", "#4477aa"),
    "communication": ("exposed communication", "#ee6677"),
    "optimizer": ("optimizer", "#ccbb44"),
    "other": ("other", "#dddddd"),
}
"""The phases of a step in the picture: label and colour."""


@dataclass(kw_only=True, slots=True)
class BenchmarkOptions:
    """The options of the command."""

    rounds: int = 5
    """Rounds; in each, every strategy takes some steps."""
    steps: int = 20
    """Optimizer steps of a strategy in a round."""
    strategies: str | None = None
    """Choices of sync to compare, such as ddp,ring; null: all that can run here."""

    def __post_init__(self) -> None:
        require_positive("rounds", self.rounds)
        require_positive("steps", self.steps)
        known = registry.choices("sync")
        for name in self.names or ():
            require(name in known, f"strategies={name} is not a valid choice: choose from {', '.join(known)}")

    @property
    def names(self) -> list[str] | None:
        """The strategies by name."""
        return None if self.strategies is None else self.strategies.split(",")


def main(words: Sequence[str]) -> None:
    """Measure and report, and exit with 0, 2 for the user's input, or 1."""
    if wants_help(words):
        print_help(f"{program()} benchmark [option=value …] [key=value …]", __doc__ or "", BenchmarkOptions)
        return
    with errors_as_exit_codes():
        options, overrides = parse_options(BenchmarkOptions, words)
    for_each_job(lambda config, run_dir: benchmark(config, run_dir, options), overrides)


def benchmark(config: Config, run_dir: Path, options: BenchmarkOptions) -> None:
    """Measure the strategies, and report on rank 0. Collective: every rank must call this."""
    with disable_gc():
        from ddp_trainer.commands.step_benchmark import compare_strategies  # imports torch
        from ddp_trainer.training.start import start
    with ExitStack() as stack:
        begun = start(config, read_environment(), stack)
        result = compare_strategies(begun, rounds=options.rounds, steps=options.steps, names=options.names)
    if result is None:
        return
    print_table(to_table(result))
    for reason in dict.fromkeys(result["left_out"].values()):
        print(f"left out: {reason}")
    folder = run_dir.with_name(f"benchmark-{run_dir.name}")
    write_results(folder / "benchmark", result, lambda figure: draw(result, figure))


def to_table(result: dict[str, Any]) -> Table:
    """Return the comparison for a terminal."""
    about, rows = result["about"], result["rows"]
    headers = ("img/s", "step ms", f"× {rows[0]['name']}", "min–max", "data", "fwd/bwd", "exposed comm", "optimizer",
               "sent MB", "expected", "busiest")  # fmt: skip
    title = f"{about['model']}, {about['data']}, world size {about['world_size']}, {about['backend']}"
    table = Table("sync", *headers, title=title, caption="MB per step: sent per rank, expected by arithmetic, and sent "
                  "and received by the busiest rank")  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        phases = row["phases_ms"]
        sizes = (row["sent_bytes"], row["expected_sent_bytes"], row["expected_busiest_bytes"])
        table.add_row(
            row["name"],
            f"{row['images_per_second']:,.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['relative']:.2f}",
            f"{row['relative_min']:.2f}–{row['relative_max']:.2f}",
            *(f"{phases[name]:.1f}" for name in PHASES if name != "other"),
            *("–" if size is None else f"{size / 1e6:.2f}" for size in sizes),
        )
    return table


def draw(result: dict[str, Any], figure: Any) -> None:
    """Draw images per second and the phases of a step, one bar per strategy."""
    about, rows = result["about"], result["rows"][::-1]  # the first at the top
    figure.set_size_inches(12, 1.6 + 0.38 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    names, rates = [row["name"] for row in rows], [row["images_per_second"] for row in rows]
    ranges = [row["images_per_second_by_round"] for row in rows]
    spread = [[rate - min(r) for rate, r in zip(rates, ranges, strict=True)],
              [max(r) - rate for rate, r in zip(rates, ranges, strict=True)]]  # fmt: skip
    bars = left.barh(names, rates, xerr=spread, color="#4477aa", ecolor="#333333", capsize=2)
    left.bar_label(
        bars, [f"step time {row['relative']:.2f} × {rows[-1]['name']}" for row in rows], padding=8, fontsize=8
    )
    left.set(xlabel="images per second (median and range of the rounds)", xlim=(0, 1.35 * max(map(max, ranges))))
    starts = [0.0] * len(rows)
    for phase, (label, colour) in PHASES.items():
        lengths = [row["phases_ms"][phase] for row in rows]
        right.barh(names, lengths, left=starts, color=colour, label=label)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    right.set(xlabel="milliseconds per step")
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=len(PHASES))
    figure.suptitle(
        f"{about['model']} on {about['data']}, {about['world_size']} ranks of {about['threads_per_rank']} thread(s), "
        f"{about['backend']}, {about['precision']}, global batch {about['global_batch_size']}"
    )
