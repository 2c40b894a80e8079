"""The results of benchmark and plan: a table on the console, and a JSON file."""

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from ddp_trainer.output import output_file
from ddp_trainer.progress import print_table


def print_numbers(table: Table) -> None:
    """Print a table, all columns but the first aligned right."""
    for column in table.columns[1:]:
        column.justify = "right"
    print_table(table)


def write_results(results: dict[str, Any], run_dir: Path, name: str) -> None:
    """Write `results` to <output_dir>/<name>-<name of the run>/<name>.json, and print this path.

    Raises:
        ConfigError, TransientError: the file cannot be written.
    """
    path = run_dir.with_name(f"{name}-{run_dir.name}") / f"{name}.json"
    with output_file(path) as file:
        file.write(json.dumps(results, indent=1).encode())
    print(f"wrote {path}")
