"""Outputs for people and programs: training continues where they cannot be written, or are
damaged.
"""

import json
import math
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import clean_environment, launch, run_command, succeed, torchrun, wait_for
from runs import TENSORBOARD, TINY, newest_step, read_summary, records, train_on
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_trainer.training.summary import Status, Summary

FAULTY = str(Path(__file__).with_name("faulty.py"))
PYTHON = f"{sys.executable} -m ddp_trainer"
TORCHRUN = " ".join([*torchrun(2), "-m ddp_trainer"])
LOST_STDOUT = {
    "| head -1": "{} | head -1; exit ${{PIPESTATUS[0]}}",
    "> /dev/full": "{} > /dev/full",
    "> /dev/full 2>&1": "{} > /dev/full 2>&1",
    "closed": "{} >&- 2>&-",
    "ascii": "PYTHONIOENCODING=ascii {}",
}


@pytest.mark.fault("stdout lost: closed, full, a pipe without reader, ASCII")
@pytest.mark.parametrize(
    ("way", "command"),
    [
        *((way, PYTHON) for way in LOST_STDOUT),
        *((way, TORCHRUN) for way in ("| head -1", "closed")),
    ],
    ids=lambda value: {PYTHON: "python", TORCHRUN: "torchrun"}.get(value, value),
)
def test_a_lost_stdout_ends_no_training(way: str, command: str, tmp_path: Path) -> None:
    words = (
        " ".join([command, *TINY, TENSORBOARD, f"output_dir={tmp_path}", "name=run"])
        .replace("[", "'[")
        .replace("]", "]'")
    )
    done = run_command(["bash", "-c", LOST_STDOUT[way].format(words)], LC_ALL="C.UTF-8")
    assert done.code == 0, done.output
    assert read_summary(tmp_path / "run")["status"] == "finished"
    assert "epoch 2/2" in (tmp_path / "run/train.log").read_text()


@pytest.mark.fault("the terminal gone without a signal")
def test_a_terminal_that_is_gone_ends_no_training(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = [*PYTHON.split(), *TINY, TENSORBOARD, "epochs=60", f"output_dir={tmp_path}", "name=run"]
    with subprocess.Popen(
        words, env=clean_environment(), stdin=theirs, stdout=theirs, stderr=theirs
    ) as job:
        wait_for(lambda: newest_step(tmp_path / "run") > 0)
        os.close(theirs)
        os.close(ours)
        assert job.wait(timeout=60) == 0
    assert read_summary(tmp_path / "run")["epochs"] == 60


@pytest.mark.fault("a disk filled to the last byte in training")
def test_a_disk_filled_to_the_last_byte_ends_no_training(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    ballast = small_disk / "ballast"
    words = (
        *TINY,
        TENSORBOARD,
        f"output_dir={small_disk}",
        "name=run",
        "log_every_steps=1",
        "checkpoint.keep_last=1",
    )
    command = [*torchrun(2), "-m", "ddp_trainer", *words, "epochs=60"]
    told = small_disk.with_name("output")
    with (
        open(told, "w") as output,
        subprocess.Popen(command, env=clean_environment(), stdout=output, stderr=output) as job,
    ):
        wait_for(lambda: newest_step(run_dir) > 0)
        with open(ballast, "wb", buffering=0) as file:
            for size in (2**16, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        wait_for(lambda: told.read_text().count("was not written") > 3)
        ballast.unlink()
        assert job.wait(timeout=120) == 0, told.read_text()
    assert newest_step(run_dir) == 480
    train_on(2, *words, "epochs=61")
    assert read_summary(run_dir)["steps"] == 488


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a cut": lambda data: data[: len(data) // 2],
    "a flipped bit": lambda data: bytes([*data[:40], data[40] ^ 4, *data[41:]]),
    "no text": lambda data: b"\xff\xfe" + data,
    "another JSON value": lambda data: b"[]\n" + data,
    "a line of NaN": lambda data: data + b'{"step": NaN}\n',
    "nothing": lambda data: b"",
}


@pytest.mark.fault("a damaged metrics.jsonl or summary.json")
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_damaged_outputs_end_no_run(name: str, damage: str, tmp_path: Path) -> None:
    words = (*TINY, TENSORBOARD, f"output_dir={tmp_path}", "name=run")
    train_on(1, *words)
    path = tmp_path / "run" / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert train_on(1, *words)["status"] == "finished"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert train_on(1, *words, "epochs=3")["steps"] == 24


@pytest.mark.fault("SIGKILL before the first checkpoint")
def test_a_kill_before_the_first_checkpoint_doubles_no_point(tmp_path: Path) -> None:
    words = [*TINY, TENSORBOARD, f"output_dir={tmp_path}", "name=run", "log_every_steps=1"]
    run_command([sys.executable, FAULTY, *words], FAULT="kill:0:5")
    assert newest_step(tmp_path / "run") == 0
    succeed(*words)
    assert [record["step"] for record in records(tmp_path / "run", "train/loss")] == list(
        range(1, 17)
    )
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 17))


@pytest.mark.fault("a loss that is not finite, skipped to the end")
def test_a_run_whose_updates_are_skipped_fails_if_its_model_is_of_no_use(tmp_path: Path) -> None:
    words = (
        *TINY,
        TENSORBOARD,
        f"output_dir={tmp_path}",
        "name=run",
        "optimizer.lr=1e30",
        "on_nonfinite=skip",
    )
    done = launch(*words)
    assert done.code == 1
    assert "logits in the evaluation after step 8 are infinite or NaN" in done.output
    assert records(tmp_path / "run", "eval/loss")[0]["eval/loss"] == "nan"
    assert not (tmp_path / "run/summary.json").exists()


def test_a_summary_never_holds_nan() -> None:
    known: dict[str, Any] = {
        "status": Status.finished,
        "eval_split": "test",
        "eval_count": 1,
        "epochs": 1,
    }
    where: dict[str, Any] = {
        "steps": 1,
        "world_size": 1,
        "device": "cpu",
        "backend": "gloo",
        "sync": "ddp",
    }
    measured: dict[str, Any] = dict.fromkeys(
        ("eval_top1", "eval_loss", "best_top1", "seconds"), math.nan
    )
    values = json.loads(Summary(**known, **where, **measured).to_json())
    assert [values[key] for key in ("eval/top1", "eval/loss", "best_top1", "seconds")] == [None] * 4
