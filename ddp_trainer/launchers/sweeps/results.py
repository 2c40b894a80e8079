"""The table that a sweep prints at its end: a row for each job, the best first."""

import math
import os
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Column, Table

from ddp_trainer.progress import print_table
from ddp_trainer.training.summary import Summary

REPEATED = ("data.fold", "seed")
"""Keys over which a sweep repeats a job, to see how far its result varies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The result of one job."""

    overrides: Sequence[str]
    """The overrides of the job, ``key=value``."""
    run_dir: Path
    score: float | None
    """The best value of `select_by`; NaN: there is none; None: the job failed, or did not run."""
    select_by: str
    is_higher_better: bool = True
    seconds: float | None = None
    """The time of training and evaluation."""

    @property
    def settings(self) -> dict[str, str]:
        """The overrides by key."""
        words = (word.lstrip("+").partition("=") for word in self.overrides)
        return {key: value for key, _, value in words}

    @property
    def rank(self) -> float:
        """A number that is higher for a better score, and lowest without one."""
        if self.score is None or math.isnan(self.score):
            return -math.inf
        return self.score if self.is_higher_better else -self.score


def score_of(summary: Summary) -> float:
    """Return the best value; without one, for example in epoch 1, the last value, or NaN."""
    last = {"eval/top1": summary.eval_top1, "eval/loss": summary.eval_loss}
    value = last.get(summary.select_by) if summary.best_value is None else summary.best_value
    return math.nan if value is None else value


RESULTS: dict[Path, Row] = {}
"""The jobs of the sweep that this process runs, in the order in which they ended, by `run_dir`: a
job that a sweeper repeats has one row.
"""


def print_results() -> None:
    """Print the table, and the command that compares the runs; nothing without several jobs."""
    rows = sorted(RESULTS.values(), key=lambda row: row.rank, reverse=True)
    if len(rows) < 2:
        return
    print_table(to_table(rows))
    for line in means(rows):
        print(line)
    # absolute first, because a sweep may vary output_dir between both kinds of path
    folder = os.path.relpath(os.path.commonpath([row.run_dir.parent.absolute() for row in rows]))
    print(f"compare the runs: python -m ddp_trainer report {shlex.quote(folder)}", flush=True)


def varied_keys(rows: Sequence[Row]) -> list[str]:
    """Return the keys whose value differs between the jobs."""
    keys = dict.fromkeys(key for row in rows for key in row.settings)
    return [key for key in keys if len({row.settings.get(key) for row in rows}) > 1]


def means(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the mean over the folds and seeds of each setting of the other keys, as a line."""
    varied = varied_keys(rows)
    repeated = [key for key in varied if key in REPEATED]
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row.rank > -math.inf and repeated:
            rest = [f"{key}={row.settings.get(key)}" for key in varied if key not in REPEATED]
            scores.setdefault(" ".join(rest), []).append(row.score or 0.0)
    for setting, values in scores.items():
        if len(values) > 1:
            yield (
                f"{setting or rows[0].select_by}: {statistics.mean(values):.4f} ±"
                f" {statistics.stdev(values):.4f} (mean and standard deviation of {len(values)}"
                f" jobs over {' and '.join(repeated)})"
            )


def to_table(rows: Sequence[Row]) -> Table:
    """Return a table with a column for each key whose value differs between the jobs."""
    varied = varied_keys(rows)
    score = f"best {rows[0].select_by}"
    table = Table(*(Column(key, justify="right") for key in (*varied, score, "seconds")))
    table.add_column("run directory", overflow="fold")
    for row in rows:
        table.add_row(
            *(row.settings.get(key, "") for key in varied),
            "failed" if row.score is None else f"{row.score:.4f}",
            "" if row.seconds is None else f"{row.seconds:,.1f}",
            str(row.run_dir),
        )
    return table
