"""Write a report on one or more runs as one HTML file, which needs no other file and no network:

    python -m ddp_trainer report outputs/digits-resnet18-ddp
    python -m ddp_trainer report outputs/first outputs/second output=report.html

It shows the results, the curves, the evaluations with their mistakes, the configs and the versions.
Several runs are compared in the same charts and tables. Only the files in the run directories are
read; the command evaluate writes the evaluations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import parse_options, split_paths
from ddp_trainer.config.errors import require
from ddp_trainer.tools.report.page import write_report


@dataclass(kw_only=True, slots=True)
class ReportOptions:
    """The options of the command."""

    output: str | None = None
    """The file to write; null: report.html in the first run directory."""
    title: str | None = None
    """The title of the page; null: the names of the runs."""


def main(words: Sequence[str]) -> None:
    """Write the report; exit with 2 for wrong input, with 1 for any other failure."""
    usage = "report RUN_DIR [RUN_DIR …] [option=value …]"
    with errors_as_exit_codes():
        options, rest = parse_options(ReportOptions, words, usage=usage, description=__doc__)
        paths, unknown = split_paths(rest)
        unknown += [path for path in paths if path.startswith("-")]
        names = ", ".join(field.name for field in fields(ReportOptions))
        word = next(iter(unknown), None)
        require(
            word is None,
            f"{word} is unknown: report has the options {names}; for a directory, write ./{word}",
        )
        require(bool(paths), "report takes one or more run directories: report RUN_DIR")
        require(options.output != "", "output= is empty: name a file, or leave output out")
        run_dirs = [Path(path) for path in paths]
        output = Path(options.output or run_dirs[0] / "report.html")
        write_report(run_dirs, output, title=options.title)
    print(f"{output} ({output.stat().st_size / 1e6:.2f} MB)")
