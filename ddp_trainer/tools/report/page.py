"""The report: one HTML file that loads no other file."""

import base64
import errno
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ddp_trainer.config.errors import path_error, require
from ddp_trainer.files import replace_text
from ddp_trainer.tools.report.curves import MAX_POINTS, encode, rows_allowed
from ddp_trainer.tools.report.evaluations import thumbnail_shares
from ddp_trainer.tools.report.files import text
from ddp_trainer.tools.report.runs import Run, compare, distinct_names, flatten
from ddp_trainer.version import __version__

TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"
STYLES = (VENDOR / "uPlot.min.css", TEMPLATES / "style.css")
PLOT = VENDOR / "uPlot.iife.min.js"
SCRIPTS = (
    "page.js",
    "curves.js",
    "view.js",
    "marks.js",
    "charts.js",
    "toolbar.js",
    "timeline.js",
    "lanes.js",
    "matrix.js",
    "calibration.js",
    "evaluation.js",
    "start.js",
)
"""The scripts of the page, in order: they share one scope, and a script may use the scripts before
it.
"""
MAX_NAMES = 3
"""Maximum number of names of runs in the title of a page."""
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Characters to escape in JSON: they could end a script element, or old browsers do not accept them
in scripts.
"""


def write_report(run_dirs: Sequence[Path], output: Path, *, title: str | None = None) -> None:
    """Write a report about `run_dirs` to `output`, which is either replaced completely or left as
    it was.

    Raises:
        ConfigError: a directory is not a run directory or is given twice, or the file cannot be
        written.
        TransientError: the file system is full or does not answer.
    """
    paths = [path.resolve() for path in run_dirs]
    twice = next(
        (path for path, own in zip(run_dirs, paths, strict=True) if paths.count(own) > 1), None
    )
    require(twice is None, f"{twice} is given twice: give each run directory once")
    page = build_page([Run(path) for path in run_dirs], title=title)
    try:
        # half of a surrogate pair is not UTF-8
        replace_text(output, page.encode(errors="replace").decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
        raise path_error(
            cause, f"output={output} must be a file in a folder that can be written: {reason}"
        ) from error


def build_page(runs: Sequence[Run], *, title: str | None = None) -> str:
    """Return the HTML of a report about `runs`."""
    names = distinct_names(runs)
    rows = rows_allowed([table for run in runs for table in run.metrics.tables])
    data = {
        "runs": [
            {
                "name": name,
                **encode(run.metrics, rows=rows),
                "lanes": [lanes.encode() for lanes in run.lanes],
            }
            for name, run in zip(names, runs, strict=True)
        ],
        "evaluations": encode_evaluations(runs),
    }
    pictures = [run.pictures() for run in runs]
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    scripts = "\n".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'{PLOT.read_text(encoding="utf-8")}\n(() => {{\n"use strict";\n{scripts}\n}})();\n'
    differing, config = compare([run.config for run in runs])
    return template().render(
        title=text(title)
        or f"Report on {', '.join(names) if len(names) <= MAX_NAMES else f'{len(names)} runs'}",
        policy=policy(style=style, script=script),
        style=Markup(style),
        script=Markup(script),
        data=Markup(script_json(data)),
        runs=list(zip(names, runs, pictures, strict=True)),
        differing=differing,
        config=config,
        summary=compare([flatten(run.summary) for run in runs])[1],
        versions=compare([run.versions for run in runs])[1],
        shortened=f"{MAX_POINTS:,}" if rows else "",
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


@cache
def template() -> Template:
    """Return the template of the page, which escapes HTML in values. It is compiled once, because
    this takes 0.1 s.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


def encode_evaluations(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the evaluations of all runs as JSON values, each with its run's index and its folder's
    name.
    """
    found = [(place, *item) for place, run in enumerate(runs) for item in run.evaluations.items()]
    shares = thumbnail_shares([evaluation for _, _, evaluation in found])
    return [
        {"run": place, "folder": text(name), **evaluation.encode(max_thumbnails=share)}
        for (place, name, evaluation), share in zip(found, shares, strict=True)
    ]


def script_json(data: object) -> str:
    """Return `data` as JSON, escaped so that it can stand inside a script element of HTML."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(
        ESCAPES
    )


def policy(*, style: str, script: str) -> str:
    """Return a content security policy that allows only this style, this script and images in data
    URIs.
    """
    digests = [
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for part in (style, script)
    ]
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digests[0]}'; script-src"
        f" 'sha256-{digests[1]}'; base-uri 'none'; form-action 'none'"
    )
