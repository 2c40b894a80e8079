"""The results of benchmark and plan: a table on the console, and numbers as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_trainer.config.errors import TransientError


def print_table(table: Table) -> None:
    """Print a table with its numbers aligned, at its full width where the output is not a terminal."""
    for column in table.columns[1:]:
        column.justify = "right"
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`; TransientError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise TransientError(f"{path} was not written: {error.strerror}") from error
    print(f"wrote {path}")
