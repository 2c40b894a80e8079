"""Changes of machines and directories while a job trains, without any fault of the job."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import memory_disk
from processes import run_command, start_command, succeed, torchrun, wait_for
from runs import TINY, newest_step, read_summary, records

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m", "ddp_trainer"]
EPOCHS = 60


def disturbed(
    command: list[str], disturb: Callable[[int, Path], object], tmp_path: Path
) -> tuple[int, str]:
    """Start a job, call ``disturb(pid, run_dir)`` after its first checkpoint; return its exit code
    and output.
    """
    run_dir = tmp_path / "run"
    words = [*TINY, f"epochs={EPOCHS}", f"output_dir={tmp_path}", "name=run"]
    with start_command([*command, *words], NPROC="2", PYTHON=sys.executable) as job:
        try:
            wait_for(lambda: newest_step(run_dir) > 0)
            disturb(job.pid, run_dir)
            output, _ = job.communicate(timeout=120)
        finally:
            job.kill()
    return job.returncode, output


def hang_up(pid: int, run_dir: Path) -> None:
    os.killpg(pid, signal.SIGHUP)


@pytest.mark.fault("a terminal closed in training (SIGHUP)")
@pytest.mark.parametrize(
    "command", [PYTHON, [str(ROOT / "launch/local.sh")]], ids=["python", "local.sh"]
)
def test_a_terminal_that_is_closed_ends_no_training(command: list[str], tmp_path: Path) -> None:
    code, output = disturbed(command, hang_up, tmp_path)
    assert code == 0, output
    assert read_summary(tmp_path / "run")["epochs"] == EPOCHS


@pytest.mark.fault("a terminal closed in training (SIGHUP)")
def test_a_terminal_that_is_closed_stops_plain_torchrun_with_a_checkpoint(tmp_path: Path) -> None:
    code, output = disturbed([*torchrun(2), "-m", "ddp_trainer"], hang_up, tmp_path)
    assert code != 0, "torchrun ends its job"
    stopped_at = newest_step(tmp_path / "run")
    assert (tmp_path / "run" / "stopped").read_text().strip() == str(stopped_at), output


@pytest.mark.fault("rm -rf of a run directory in training")
def test_a_run_directory_that_is_deleted_ends_no_training(tmp_path: Path) -> None:
    def delete(pid: int, run_dir: Path) -> None:
        # else files appear while others are deleted
        shutil.rmtree(run_dir.rename(tmp_path / "trash"))

    code, output = disturbed(PYTHON, delete, tmp_path)
    assert code == 0, output
    assert "training continues" in output
    assert newest_step(tmp_path / "run") == 8 * EPOCHS, "what came later was written"
    assert f"epoch {EPOCHS}/{EPOCHS}" in output


@pytest.mark.fault("a disk remounted read-only in training")
def test_a_disk_that_becomes_read_only_ends_no_training(tmp_path: Path) -> None:
    with memory_disk(tmp_path / "disk", "size=64m") as disk:

        def make_read_only(pid: int, run_dir: Path) -> None:
            # busy while a file is open for writing: a checkpoint, for example
            remount = ["mount", "-o", "remount,ro", str(disk)]
            wait_for(lambda: subprocess.run(remount, capture_output=True).returncode == 0)

        code, output = disturbed(PYTHON, make_read_only, disk)
        step = newest_step(disk / "run")
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert code == 0, output
        done = succeed(*TINY, f"epochs={EPOCHS}", f"output_dir={disk}", "name=run")
        assert f"step-{step:08d}.pt (epoch" in done.output, done.output


@pytest.mark.fault("a clock set back an hour, and 10,000 files in a run directory")
def test_a_clock_that_is_set_back_and_many_files_change_nothing(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "log_every_steps=1")
    succeed(*words, "max_steps=9")
    for number in range(10_000):
        (tmp_path / "run" / "checkpoints" / f"note-{number}").touch()
    done = run_command(["faketime", "-f", "-1h", *PYTHON, *words])
    assert done.code == 0, done.output
    assert "step 9)" in done.output, "resumed from the newest step"
    assert [record["step"] for record in records(tmp_path / "run", "train/loss")] == list(
        range(1, 17)
    )


@pytest.mark.fault("a user without home, in a folder with spaces and a newline")
def test_a_user_without_home_and_name_trains_in_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b\nc'd"
    folder.mkdir()
    nobody = ["unshare", "--user", "--map-user=54321", "env", "--unset=HOME", "--unset=USER"]
    done = run_command(
        [*nobody, *PYTHON, *TINY, "max_steps=2", "output_dir=.", "name=run"], cwd=folder
    )
    assert done.code == 0, done.output
    assert read_summary(folder / "run")["steps"] == 2
