"""Fixtures of all tests; the rule of CI for skipped tests; the table of faults.

No import of torch: the process that distributes the tests to workers imports this file, too.
"""

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_trainer.config.plugins import load_plugins
from ddp_trainer.distributed.environment import plugin_modules

gc.disable()  # until the tests are collected, because it would take half of that time


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let garbage collection skip what was imported to collect the tests."""
    gc.freeze()
    gc.enable()


def pytest_configure() -> None:
    """Load plug-ins, and undo what a shell does to `make test &`: all processes of the tests would
    ignore SIGINT.
    """
    load_plugins(plugin_modules())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Return environment variables under which importing torch fails."""
    (tmp_path / "no" / "torch").mkdir(parents=True)
    (tmp_path / "no" / "torch" / "__init__.py").write_text(
        "raise ImportError('torch was imported')"
    )
    root = Path(__file__).parents[1]
    already = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path / "no"), str(root), *([already] if already else [])]
        )
    }


@pytest.fixture
def train_in(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that trains under tmp_path/<name> on `ranks` ranks and returns the run
    directory.
    """

    from runs import train_on

    def go(name: str, *overrides: str, ranks: int = 1, deadline: float = 60) -> Path:
        train_on(ranks, f"output_dir={tmp_path}", f"name={name}", *overrides, deadline=deadline)
        return tmp_path / name

    return go


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train twenty steps on handwritten digits; return the run directory, which tests leave as it
    is.
    """
    from runs import train_on

    folder = tmp_path_factory.mktemp("digits")
    train_on(
        2,
        "model=lenet",
        "data=digits",
        "precision=fp32",
        "max_steps=20",
        "logger=[]",
        f"output_dir={folder}",
        "name=run",
    )
    return folder / "run"


@contextmanager
def memory_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount memory as a disk at `folder`, with options of tmpfs."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs (root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount 4 MiB of memory as a disk."""
    with memory_disk(tmp_path / "disk", "size=4m") as folder:
        yield folder


# --- CI: a skipped test is a failed run -----------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skipped test a failed one if CI=true, unless it needs a GPU."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and "gpu" not in report.keywords:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"CI must not skip {item.nodeid}: {reason}"
    return report


# --- faults: a table of what was tried, and how often all was well -------------------------------

FAULTS: dict[str, list[int]] = {}


IS_FULL = os.environ.get("TRIALS") == "full"
"""Whether faults are tried as often as ``make chaos TRIALS=full`` does."""


def trials(few: int, *, full: int) -> int:
    """Return how many times a fault is tried: `few` in CI, `full` if TRIALS=full."""
    return full if IS_FULL else few


LONG_FILES = (
    "test_container.py",
    "test_slurm.py",
    "test_slurm_stops.py",
    "test_slurm_losses.py",
    "test_lost_nodes.py",
    "test_examples.py",
    "test_whole_runs.py",
    "test_hangs.py",
    "test_torchvision_and_timm.py",
    "test_local.py",
    "test_plugins.py",
    "test_resume.py",
    "test_failure_monitor.py",
    "test_node_check.py",
    "test_image_folder.py",
    "test_bad_input.py",
)
"""The files that take longest: they begin first, so that none is left alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in tests/chaos and tests/cluster, and faults elsewhere: `make test` leaves
    it to the target of that name. Move `LONG_FILES` to the front.
    """
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        for folder in {"chaos", "cluster"} & set(item.path.parts):
            item.add_marker(folder)
        for mark in item.iter_markers("fault"):
            item.add_marker("chaos")
            item.user_properties.append(("fault", (mark.args[0], mark.kwargs.get("times", 1))))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a test that is marked with ``fault(name, times=1)`` has tried to the table."""
    faults: Any = [value for key, value in report.user_properties if key == "fault"]
    if report.when == "call" or report.failed:
        for name, times in faults:
            row = FAULTS.setdefault(name, [0, 0])
            row[0] += times
            row[1] += times if report.passed else 0


def pytest_terminal_summary(terminalreporter: "pytest.TerminalReporter") -> None:
    if FAULTS:
        which = "TRIALS=full" if IS_FULL else "fewer trials than with TRIALS=full"
        terminalreporter.section(f"faults, {which}")
        for name, (tried, survived) in [("fault", ("tried", "survived")), *FAULTS.items()]:
            terminalreporter.write_line(f"{name:80} {tried:>6} {survived:>8}")
