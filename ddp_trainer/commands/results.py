"""The results of benchmark and plan: a table on the console, numbers as JSON, and a picture."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_trainer.config.errors import TransientError


def print_table(table: Table) -> None:
    """Print a table, at its full width where the output is not a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 140
    Console(width=max(80, width)).print(table)


def write_results(path: Path, content: dict[str, Any], draw: Callable[[Any], None]) -> None:
    """Write `content` to `path`.json, and the matplotlib figure that `draw` fills to `path`.png.

    Raises:
        TransientError: they cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {path}.json")
        try:
            from matplotlib.figure import Figure  # an optional dependency
        except ModuleNotFoundError:
            print("no picture: matplotlib is not installed, pip install 'ddp_trainer[plot]'")
            return
        figure = Figure(layout="constrained")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path.with_suffix(".png"), dpi=110)
        print(f"wrote {path}.png")
    except OSError as error:
        raise TransientError(f"{path}.json and .png were not written: {error}") from error
