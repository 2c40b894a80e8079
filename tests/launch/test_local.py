"""``launch()`` in a script and as in a notebook: errors, interrupts, and the end of its ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import (
    EXAMPLES,
    end_with_descendants,
    launch,
    processes_with,
    run_command,
    start_command,
    start_launch,
    wait_for,
)
from runs import newest_step, read_summary

from ddp_trainer import Config, ConfigError, run
from ddp_trainer.cores import usable_cores
from ddp_trainer.launchers.job_file import summary_since
from ddp_trainer.launchers.local import launch as launch_from_python
from ddp_trainer.training.summary import Status, Summary

TESTS = Path(__file__).parents[1]
A_SUMMARY = Summary(
    status=Status.stopped,
    eval_split="test",
    eval_top1=0.0,
    eval_loss=None,
    eval_count=0,
    best_top1=0.0,
    epochs=0,
    steps=3,
    seconds=1.0,
    world_size=2,
    device="cpu",
    backend="gloo",
    sync="ddp",
)
IN_A_NOTEBOOK = f"""
import sys
sys.path += [{str(EXAMPLES)!r}, {str(TESTS / "chaos")!r}]
import pacing
from own_loss import FocalConfig
from ddp_trainer import Config, launch

config = Config(model="lenet", loss=FocalConfig(), observer=["pace"], epochs=100_000)
launch(config, num_ranks=2, run_dir="run")
"""
"""A program without a file, like a cell of a notebook, and with a loss of another module."""


JOB = """
import signal
import sys

import broken_parts
from ddp_trainer import Config, ConfigError, LaunchError, launch

KINDS = {
    "large": {"global_batch_size": 97},
    "divide": {"observer": {"divide": {"rank": 1}}},
    "long": {"epochs": 100_000},
    "resumed": {"epochs": 100_000, "max_steps": int(sys.argv[-1])},
}

if __name__ == "__main__":
    data = {"name": "synthetic", "num_train": 96, "num_eval": 31, "height": 12, "width": 12}
    plain = {"model": "lenet", "data": data, "global_batch_size": 12, "name": "run"}
    try:
        summary = launch(Config(**plain | KINDS[sys.argv[1]]), num_ranks=2)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        print("summary", summary.status, summary.steps)
    except (ConfigError, LaunchError) as error:
        print("raised", type(error).__name__, error)
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    """Write a script that calls `launch` on 2 ranks, and return its path."""
    (tmp_path / "job.py").write_text(JOB)
    return str(tmp_path / "job.py")


def test_an_error_in_a_rank_is_raised_by_launch(job: str, tmp_path: Path) -> None:
    wrong = launch("large", "0", script=job, cwd=tmp_path)
    assert wrong.output == (
        "raised ConfigError global_batch_size=97 must be at most the number of training samples,"
        " 96\n"
    )
    failed = launch("divide", "0", script=job, cwd=tmp_path)
    assert "raised LaunchError rank 1 on " in failed.output
    cause = "observer=divide failed in on_step (ZeroDivisionError: division by zero)"
    assert cause in failed.output


def test_an_interrupted_launch_is_saved_and_goes_on(job: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "outputs" / "run"
    printed = tmp_path / "printed"
    printed.touch()
    process = start_launch([job, "long", "0"], ranks=None, cwd=tmp_path, output=str(printed))
    try:
        wait_for(lambda: newest_step(run_dir))
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        end_with_descendants(process)
    step = newest_step(run_dir)
    output = printed.read_text()
    assert process.exitcode == 0, output
    assert output.endswith(f"summary stopped {step}\n")
    assert read_summary(run_dir)["status"] == "stopped"

    resumed = launch("resumed", str(step + 20), script=job, cwd=tmp_path)
    assert resumed.output.endswith(f"summary max_steps {step + 20}\n"), resumed.output
    assert f"step-{step:08d}.pt (epoch " in resumed.output


def test_a_launch_that_was_stopped_at_once_has_no_summary_of_an_earlier_one(tmp_path: Path) -> None:
    began = time.time()
    with pytest.raises(OSError, match=r"summary\.json"):
        summary_since(began, tmp_path)
    path = tmp_path / "summary.json"
    path.write_text(A_SUMMARY.to_json())
    assert summary_since(began - 60, tmp_path) == A_SUMMARY
    os.utime(path, (began - 60, began - 60))
    with pytest.raises(ValueError, match="of an earlier launch"):
        summary_since(began, tmp_path)


def test_ranks_know_a_loss_that_a_notebook_imports_and_do_not_outlive_its_kernel(
    tmp_path: Path,
) -> None:
    mark = f"THIS_TEST={tmp_path}"
    process = start_command(
        [sys.executable, "-c", IN_A_NOTEBOOK], cwd=tmp_path, THIS_TEST=str(tmp_path)
    )
    try:
        wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists())
        config = (tmp_path / "run/config.yaml").read_text()
        assert "own_focal" in config
        assert len(processes_with(mark)) >= 3
        process.kill()
        process.wait(timeout=30)
        wait_for(lambda: not processes_with(mark), seconds=30)
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)


@pytest.mark.parametrize("num_ranks", [0, -3, 1.5, "2", True, None])
def test_a_wrong_number_of_ranks_is_one_error(num_ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"^num_ranks=.* must be a whole number, at least 1$"):
        launch_from_python(Config(), num_ranks)


@pytest.mark.parametrize("train", [launch_from_python, run])
def test_what_is_no_config_is_one_error(train: Any) -> None:
    with pytest.raises(ConfigError, match=r"^the config is of type dict and must be a Config: "):
        train({"epochs": 1})
    config = Config()
    config.epochs = "many"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"^epochs=many must be a whole number$"):
        train(config)


def test_many_more_ranks_than_cores_are_a_warning() -> None:
    num_ranks = 2 * usable_cores() + 1
    with (
        pytest.warns(UserWarning, match=rf"^num_ranks={num_ranks} on {usable_cores()} cores is "),
        pytest.raises(ConfigError, match="sync=none runs in one process only"),
    ):
        launch_from_python(Config(sync="none"), num_ranks)


WITHOUT_GUARD = """
from ddp_trainer import Config, launch
launch(Config(model="lenet", epochs=1), num_ranks=2)
"""
RAISES = """
from dataclasses import dataclass
from ddp_trainer import Config, LossConfig, launch, register_loss


@dataclass(kw_only=True)
class MineConfig(LossConfig):
    name: str = "mine"


@register_loss("mine", MineConfig)
def build(config, *, class_counts):
    def loss(logits, labels):
        return logits.no_such_method(labels)

    return loss


if __name__ == "__main__":
    launch(Config(model="lenet", loss="mine", epochs=1), num_ranks=3)
"""


def run_script(text: str, folder: Path) -> tuple[int, list[str], float]:
    """Run a script with `text` as a user does; return exit code, lines of its output, seconds."""
    (folder / "job.py").write_text(text)
    began = time.monotonic()
    done = run_command([sys.executable, "job.py"], cwd=folder)
    return done.code, done.output.splitlines(), time.monotonic() - began


def test_a_script_without_a_guard_ends_with_the_line_that_is_missing(tmp_path: Path) -> None:
    code, lines, seconds = run_script(WITHOUT_GUARD, tmp_path)
    assert code == 1, lines
    assert seconds < 20
    assert lines[-1].endswith(
        "ConfigError: job.py calls launch again in each rank, because each rank imports the script:"
        ' move the call below if __name__ == "__main__":'
    )
    assert len(lines) < 12, lines
    assert not (tmp_path / "outputs").exists()


def test_a_script_that_ranks_cannot_import_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(RAISES)
    with script.open() as text:
        done = subprocess.run(
            [sys.executable, "-"], stdin=text, capture_output=True, text=True, cwd=tmp_path
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "ConfigError: ranks cannot import <stdin>: write the script to a file"
    )


def test_a_failure_of_run_says_how_to_run_the_script_again(tmp_path: Path) -> None:
    code, lines, _ = run_script(
        RAISES.replace("num_ranks=3", "").replace("launch", "run"), tmp_path
    )
    assert code == 1, lines
    assert any(line.endswith("to continue: python job.py") for line in lines), lines


def test_an_exception_in_a_users_code_is_shown_once(tmp_path: Path) -> None:
    code, lines, _ = run_script(RAISES, tmp_path)
    assert code == 1, lines
    cause = "AttributeError: 'Tensor' object has no attribute 'no_such_method'"
    assert sum(cause in line for line in lines) <= 2, lines
    assert any(line.endswith("in loss: return logits.no_such_method(labels)") for line in lines)
    assert len(lines) < 30, lines
