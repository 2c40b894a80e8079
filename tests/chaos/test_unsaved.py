"""A launch whose last checkpoint is not on disk has failed, however it ended."""

import itertools
import shutil
from pathlib import Path

import pytest
from processes import Finished, run_forked
from runs import TINY, newest_step, read_summary, train_on

FILE_KIB = (4, 20, 64, 100, 130)
"""Limits for the size of a file: a checkpoint of `TINY` has 139 KiB, its config.yaml 2 KiB."""
ENDS = {
    "finished": ("epochs=3",),
    "max_steps": ("epochs=3", "max_steps=20"),
    "an interval": ("epochs=3", "checkpoint.every_steps=3", "checkpoint.keep_last=2"),
    "a graceful stop": ("epochs=1000",),
}


def train_with_limit(folder: Path, end: str, *, kib: int) -> Finished:
    """Train with a limit for the size of each file."""
    variables = {}
    if end == "a graceful stop":
        (folder / "stop").touch()
        variables["DDP_TRAINER_STOP_FILE"] = str(folder / "stop")
    words = [*TINY, *ENDS[end], f"output_dir={folder}", "name=run"]
    return run_forked(["-m", "ddp_trainer", *words], cwd=folder, file_kib=kib, **variables)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train to step 16, and return the run directory."""
    folder = tmp_path_factory.mktemp("saved")
    train_on(1, *TINY, f"output_dir={folder}", "name=run")
    return folder / "run"


@pytest.mark.fault("a last checkpoint that cannot be written")
@pytest.mark.parametrize(("end", "kib"), [*itertools.product(ENDS, FILE_KIB)])
def test_a_launch_that_has_not_saved_its_end_fails(
    end: str, kib: int, saved: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(saved, run_dir)
    before = read_summary(run_dir)
    done = train_with_limit(tmp_path, end, kib=kib)
    assert done.code == 1, done.output
    [line] = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert " was not written (File too large), so the end of this training is not saved" in line
    assert f", and the last good checkpoint is {run_dir}/checkpoints/step-00000016.pt: " in line
    assert "Traceback" not in done.output
    assert read_summary(run_dir) == before
    assert newest_step(run_dir) == 16
    assert not [*run_dir.rglob(".*.writing")]
