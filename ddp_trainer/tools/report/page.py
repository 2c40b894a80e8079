"""The report: one HTML file that loads no other file."""

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddp_trainer.config.errors import escape_controls, require
from ddp_trainer.output import OTHER_OUTPUT, output_file
from ddp_trainer.tools.folder_reader import number, text
from ddp_trainer.tools.report import charts
from ddp_trainer.tools.report.evaluations import compare_classes
from ddp_trainer.tools.report.runs import Run, flat_texts, rows_by_key, run_labels
from ddp_trainer.tools.report.values import format_duration, format_number, format_share
from ddp_trainer.version import __version__


def write_report(run_dirs: Sequence[Path], output: Path, *, title: str | None = None) -> None:
    """Write a report about `run_dirs` to `output`; after an error, an old file is unchanged.

    Raises:
        ConfigError: a directory is not a run directory or is given twice, or the file cannot be
        written.
        TransientError: the file system is full or does not answer.
    """
    places = [os.path.realpath(path) for path in run_dirs]
    for path, place in zip(run_dirs, places, strict=True):
        require(places.count(place) == 1, f"{path} is given twice: give each run directory once")
    page = build_page([Run(path) for path in run_dirs], title=title)
    with output_file(output, fix=OTHER_OUTPUT, begin=b"<!doctype html>") as file:
        page = escape_controls(page)  # because a terminal may show the page too
        file.write(page.encode(errors="replace"))  # because UTF-8 has no surrogates


def build_page(runs: Sequence[Run], *, title: str | None = None) -> str:
    """Return the HTML of a report about `runs`."""
    names = run_labels(runs)
    metrics = [run.metrics for run in runs]
    x_axis = charts.XAxis(metrics)
    config = rows_by_key([run.config for run in runs])
    return render(
        "report.html",
        title=text(title or f"Report on {names[0] if len(runs) == 1 else f'{len(runs)} runs'}"),
        names=names,
        runs=runs,
        plot=charts,
        x_axis=x_axis,
        charts=charts.build_charts(metrics, x_axis),
        comparisons=compare_classes([run.evaluations for run in runs]),
        differing=[row for row in config if len(set(row[1:])) > 1],
        config=config,
        summary=rows_by_key([flat_texts(run.summary) for run in runs]),
        versions=rows_by_key([run.versions for run in runs]),
    )


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template with `values`."""
    environment = Environment(
        loader=PackageLoader("ddp_trainer.tools.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": format_duration,
        "finite": number,
        "number": format_number,
        "share": format_share,
        "text": text,
    }
    return environment.get_template(template).render(
        # random for each page, so that no text in a user's files can run as a script
        nonce=secrets.token_urlsafe(),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        **values,
    )
