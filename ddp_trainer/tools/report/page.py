"""The report: one HTML file that loads no other file."""

import base64
import errno
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ddp_trainer.config.errors import path_error, require
from ddp_trainer.files import replace_text
from ddp_trainer.tools.report import charts
from ddp_trainer.tools.report.runs import Run, distinct_names, duration, flat_texts, rows_by_key
from ddp_trainer.tools.report.values import format_number, format_share, text
from ddp_trainer.version import __version__

TEMPLATES = Path(__file__).parent / "templates"
MAX_NAMES = 3
"""Maximum number of names of runs in the title of a page."""


def write_report(run_dirs: Sequence[Path], output: Path, *, title: str | None = None) -> None:
    """Write a report about `run_dirs` to `output`, which is replaced completely or left as it was.

    Raises:
        ConfigError: a directory is not a run directory or is given twice, or the file cannot be
        written.
        TransientError: the file system is full or does not answer.
    """
    paths = [path.resolve() for path in run_dirs]
    for path, resolved in zip(run_dirs, paths, strict=True):
        require(paths.count(resolved) == 1, f"{path} is given twice: give each run directory once")
    page = build_page([Run(path) for path in run_dirs], title=title)
    try:
        # half of a surrogate pair is not UTF-8
        replace_text(output, page.encode(errors="replace").decode())
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
        raise path_error(
            cause,
            f"output={output} must be a file in a folder that can be written: {cause.strerror}",
        ) from error


def build_page(runs: Sequence[Run], *, title: str | None = None) -> str:
    """Return the HTML of a report about `runs`."""
    names = distinct_names(runs)
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    subject = ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} runs"
    metrics = [run.metrics for run in runs]
    x_axis = charts.XAxis(metrics)
    config = rows_by_key([run.config for run in runs])
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "number": format_number,
        "share": format_share,
        "text": text,
    }
    return environment.get_template("report.html").render(
        title=text(title) or f"Report on {subject}",
        policy=policy(style=style, script=script),
        style=Markup(style),
        script=Markup(script),
        names=names,
        runs=runs,
        plot=charts,
        x_axis=x_axis,
        charts=charts.build_charts(metrics, x_axis),
        differing=[row for row in config if len(set(row[1:])) > 1],
        config=config,
        summary=rows_by_key([flat_texts(run.summary) for run in runs]),
        versions=rows_by_key([run.versions for run in runs]),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
    )


def policy(*, style: str, script: str) -> str:
    """Return a content security policy: only this style, this script and images in data URIs."""
    digests = [
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for part in (style, script)
    ]
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digests[0]}'; script-src"
        f" 'sha256-{digests[1]}'; base-uri 'none'; form-action 'none'"
    )
