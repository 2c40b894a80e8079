"""Loggers whose clients fail, exit or hang: training goes on, and the failure is one line."""

import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import on_ranks
from runs import TINY, compose, read_summary, records
from test_bad_input import refused

from ddp_trainer import Logger, LoggerConfig, register_logger, run
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.observers.loggers import base
from ddp_trainer.observers.loggers.base import Loggers

METHODS = ("start", "scalars", "image", "text", "hparams", "close")


def logger_that(act: Callable[..., Any], *, in_background: bool = False) -> Logger:
    """Return a logger whose methods all call `act` with their name and arguments."""
    methods: dict[str, Any] = {
        name: (lambda self, *args, name=name: act(name, *args)) for name in METHODS
    }
    return type("Acting", (Logger,), methods | {"in_background": in_background})()


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises `error`."""

    def act(*args: Any) -> None:
        raise error

    return act


def test_calls_in_the_background_keep_their_order() -> None:
    calls: list[tuple[Any, ...]] = []
    with Loggers(
        {"one": logger_that(lambda *call: calls.append(call), in_background=True)}
    ) as group:
        group.start(0)
        for step in range(1, 100):
            group.call("scalars", {"a": step}, step)
        group.call("hparams", {}, {"b": 1.0})
    assert calls == [
        ("start", 0),
        *(("scalars", {"a": step}, step) for step in range(1, 100)),
        ("hparams", {}, {"b": 1.0}),
        ("close",),
    ]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "error", [OSError("a\nfull disk"), SystemExit(3), GeneratorExit()], ids=repr
)
def test_a_failure_of_any_kind_is_one_line(
    error: BaseException, in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    good = logger_that(lambda name, *args: calls.append(name))
    bad = logger_that(raising(error), in_background=in_background)
    with caplog.at_level(logging.WARNING), Loggers({"bad": bad, "good": good}) as group:
        group.start(0)
        for step in range(1, 4):
            group.call("scalars", {"a": 1.0}, step)
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    assert [record.message for record in caplog.records] == [
        f"logger=bad failed ({cause}); training continues"
    ]
    assert calls == ["start", "scalars", "scalars", "scalars", "close"]


def test_an_interrupt_of_the_user_is_no_failure_of_a_logger() -> None:
    group = Loggers({"one": logger_that(raising(KeyboardInterrupt()))})
    with pytest.raises(KeyboardInterrupt):
        group.start(0)


def test_records_for_a_client_that_hangs_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "MAX_PENDING_CALLS", 10)
    monkeypatch.setattr(base, "CLOSE_SECONDS", 0.2)
    answer = threading.Event()
    calls = []

    def act(name: str, *args: Any) -> None:
        answer.wait()
        calls.append(name)

    with (
        caplog.at_level(logging.WARNING),
        Loggers({"slow": logger_that(act, in_background=True)}) as group,
    ):
        group.start(0)
        for step in range(1, 100):
            group.call("scalars", {"a": 1.0}, step)
    assert [record.message for record in caplog.records] == [
        "logger=slow failed (10 records wait to be sent, new ones are dropped); training continues",
        "logger=slow did not finish within 0 s; its last records may be missing",
    ]
    answer.set()


def test_a_slow_client_is_closed_also_if_records_were_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "MAX_PENDING_CALLS", 10)
    calls: list[str] = []

    def act(name: str, *args: Any) -> None:
        time.sleep(0.05)
        calls.append(name)

    with Loggers({"slow": logger_that(act, in_background=True)}) as group:
        group.start(0)
        for step in range(1, 100):
            group.call("scalars", {"a": 1.0}, step)
    assert calls[0] == "start"
    assert calls[-1] == "close"
    assert 8 < len(calls) < 20


def test_without_a_start_nothing_is_called() -> None:
    calls: list[str] = []
    for in_background in (False, True):
        with Loggers(
            {
                "one": logger_that(
                    lambda name, *args: calls.append(name), in_background=in_background
                )
            }
        ):
            pass
    assert calls == []


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a b/c\n", b'{"a": 1}'])
def test_all_launches_share_an_id_and_a_damaged_one_is_replaced(
    content: bytes, tmp_path: Path
) -> None:
    first = base.read_id(tmp_path)
    assert base.read_id(tmp_path) == first
    (tmp_path / "run_id").write_bytes(content)
    second = base.read_id(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{16}", second)
    assert second != first
    assert base.read_id(tmp_path) == second


# --- whole runs -----------------------------------------------------------------------------------


BAD: dict[str, tuple[Callable[..., Any], bool]] = {
    "leaves": (raising(SystemExit(1)), False),
    "leaves_in_background": (raising(SystemExit(1)), True),
    "hangs_in_background": (lambda *call: time.sleep(3600), True),
}
"""What the methods of a logger do, and whether in the background, by the logger's name."""


def train_with_bad_loggers(folder: str) -> None:
    """Train as one rank with metrics.jsonl and all bad loggers."""
    base.CLOSE_SECONDS = 1.0
    for name, (act, in_background) in BAD.items():
        schema = make_dataclass("BadConfig", [("name", str, name)], bases=(LoggerConfig,))
        register_logger(name, schema, builder=partial(build_bad, act, in_background))
    loggers = f"logger=[{','.join(BAD)},jsonl]"
    run(compose(*TINY, loggers, "log_every_steps=1", f"output_dir={folder}", "name=run"))


def build_bad(
    act: Callable[..., Any], in_background: bool, config: LoggerConfig, run_dir: Path
) -> Logger:
    return logger_that(act, in_background=in_background)


def test_clients_that_exit_or_hang_end_no_training(tmp_path: Path) -> None:
    on_ranks(2, train_with_bad_loggers, str(tmp_path))
    assert read_summary(tmp_path / "run")["status"] == "finished"
    assert len(records(tmp_path / "run", "train/loss")) == 16
    assert set(re.findall(r"WARNING (logger=.*)", (tmp_path / "run/train.log").read_text())) == {
        "logger=leaves failed (SystemExit: 1); training continues",
        "logger=leaves_in_background failed (SystemExit: 1); training continues",
        "logger=hangs_in_background did not finish within 1 s; its last records may be missing",
    }


# --- packages that are missing --------------------------------------------------------------------


def test_all_ranks_refuse_a_logger_whose_package_is_missing(tmp_path: Path) -> None:
    packages = ["wandb", "mlflow"]
    commands = [
        (*TINY, f"logger=[jsonl,{package}]", f"output_dir={tmp_path}") for package in packages
    ]
    assert refused(2, *commands, without=packages) == [
        f"logger={package} needs {package}: pip install 'ddp_trainer[{package}]'"
        for package in packages
    ]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("wandb/offline-run-1/run.wandb", "needs wandb"),
        (
            "wandb/__init__.py",
            "needs wandb, which cannot be imported (NameError: name 'oops' is not defined)",
        ),
    ],
)
def test_a_folder_in_place_of_a_package_is_one_error(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is what an earlier run of wandb leaves in the current folder."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("oops")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=f"^logger=wandb {re.escape(message)}: pip install "):
        base.import_client("wandb")
    sys.modules.pop("wandb", None)
