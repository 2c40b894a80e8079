"""Write a report on one or more runs as one HTML file, which needs no other file and no network:

    python -m ddp_trainer report outputs/digits-resnet18-ddp
    python -m ddp_trainer report outputs/first outputs/second output=report.html
    python -m ddp_trainer report outputs/sweep

A directory that has run directories in it, such as that of a sweep, stands for all of these.
The report shows the results, the curves, the evaluations with their mistakes, the configs and the
versions. Several runs are compared in the same charts and tables. The report uses only the files in
the run directories; the command evaluate writes the files of an evaluation.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import parse_options, split_paths
from ddp_trainer.config.errors import config_class, require
from ddp_trainer.config.run_dirs import is_run_dir, run_dirs_in
from ddp_trainer.tools.report.page import write_report


@config_class
class ReportOptions:
    """The options of the command."""

    output: str | None = None
    """The path of the report; null: report.html in the first directory."""
    title: str | None = None
    """The title of the page; null: the name or the number of the runs."""


def main(words: Sequence[str]) -> None:
    """Write the report; exit with 2 for wrong input, with 1 for any other failure."""
    usage = "report RUN_DIR [RUN_DIR …] [option=value …]"
    with errors_as_exit_codes():
        options, rest = parse_options(ReportOptions, words, usage=usage, description=__doc__)
        paths, unknown = split_paths(rest)
        require(
            not unknown,
            f"{' '.join(unknown)} is not an option of report: --help lists them; for a directory,"
            " write ./ before its name",
        )
        require(bool(paths), "report takes one or more run directories: report RUN_DIR")
        require(options.output != "", "output= is empty: name a file, or leave output out")
        # A pattern such as outputs/sweep/* also stands for an earlier report.
        folders = [path for path in paths if not path.endswith(".html") or len(paths) == 1]
        run_dirs = [run_dir for path in folders for run_dir in runs_of(Path(path))]
        output = Path(options.output or Path(paths[0]) / "report.html")
        write_report(run_dirs, output, title=options.title)
    print(f"{output} ({output.stat().st_size / 1e6:.2f} MB)")


def runs_of(path: Path) -> list[Path]:
    """Return the run directories that `path` stands for: itself, or those in it, sorted.

    Of a directory and links to it, only the directory is returned.
    """
    if is_run_dir(path):
        return [path]
    links_first = sorted(run_dirs_in(path), key=Path.is_symlink, reverse=True)
    by_place = {os.path.realpath(run_dir): run_dir for run_dir in links_first}
    return sorted(by_place.values()) or [path]
