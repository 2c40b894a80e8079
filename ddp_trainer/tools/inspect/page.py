"""The page of an inspection: one HTML file, with the first findings of each kind as pictures."""

import base64
from collections.abc import Iterable
from itertools import islice
from typing import Any

from ddp_trainer.config.errors import escape_controls
from ddp_trainer.scores.pictures import thumbnail_png
from ddp_trainer.tools.inspect.findings import Findings
from ddp_trainer.tools.report.page import render

MAX_SHOWN = 100
"""Number of findings of a kind that the page shows."""
MAX_IMAGES = 8
"""Number of images of a group of copies that the page shows."""


def build_page(findings: Findings, data: dict[str, str | None]) -> str:
    """Return the HTML. data: the description of the data set."""
    copies = sorted(findings.copies, key=lambda group: not findings.across(group))
    near = sorted(findings.near, key=lambda pair: (not findings.across(pair[:2]), -pair[2]))
    title = f"Inspection of {data.get('file') or data['root'] or data['name']}"
    page = render(
        "inspect.html",
        title=title,
        lines=list(findings.lines()),
        findings=findings,
        content=findings.to_json(),
        groups=pictures(findings, copies),
        pairs=pictures(findings, (pair[:2] for pair in near)),
        max_shown=MAX_SHOWN,
    )
    return escape_controls(page)  # because a terminal may show the page too


def pictures(findings: Findings, groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the images of the first groups, with their pictures, and how they differ."""
    return [
        {
            "across": findings.across(group),
            "size": len(group),
            "images": [
                findings.sample(place) | {"picture": data_url(findings, place)}
                for place in group[:MAX_IMAGES]
            ],
        }
        for group in islice(groups, MAX_SHOWN)
    ]


def data_url(findings: Findings, place: int) -> str:
    """Return a thumbnail of an image as a URL."""
    picture = thumbnail_png(findings.scan.picture(place))
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
