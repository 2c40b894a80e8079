"""The progress of long work: a bar on a terminal, elsewhere lines."""

import io
import itertools
from types import SimpleNamespace

import pytest
from rich.console import Console

from ddp_trainer import progress
from ddp_trainer.progress import show_progress


@pytest.fixture
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return the output of the console, which is a terminal if the parameter is True."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=request.param, width=100)
    monkeypatch.setattr(progress, "get_console", lambda: console)
    return file


@pytest.mark.parametrize("shown", [True], indirect=True)
def test_a_terminal_shows_a_bar_that_begins_where_the_work_begins(shown: io.StringIO) -> None:
    with show_progress("training", total=8, done=5) as advance:
        advance(1)
    assert "training" in shown.getvalue()
    assert "6/8" in shown.getvalue()


@pytest.mark.parametrize("shown", [False], indirect=True)
def test_elsewhere_a_line_is_printed_in_intervals(
    shown: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(step=11)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with show_progress("scanning", total=3000, done=1000) as advance:
        for _ in range(4):
            advance(500)
    assert shown.getvalue() == "scanning: 2,500 of 3,000\n"
