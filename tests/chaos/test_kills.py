"""Law 3 under fire: killed at random moments again and again, a run ends bitwise as if it had been
left alone.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from conftest import IS_FULL, trials
from processes import start_launch, wait_for
from runs import (
    TINY,
    assert_bitwise,
    compose,
    kill_in_training,
    newest_step,
    records,
    train_on,
    trained_state,
)

from ddp_trainer.tools.verify import find_damage

KILLS = trials(5, full=15)
LONG = (
    *TINY,
    f"epochs={4 * KILLS}",
    "checkpoint.every_steps=2",
    "data.augment.random_crop_padding=2",
)


def assert_undisturbed(run_dir: Path, *, ranks: int, folder: Path) -> None:
    """Compare with a run that was left alone, and check the directory after the fact."""
    train_on(ranks, *LONG, f"output_dir={folder}", "name=alone", deadline=300)
    assert_bitwise(trained_state(folder / "alone"), trained_state(run_dir))
    assert not any(find_damage(run_dir).values())
    digests = [
        [record["samples/digest"] for record in records(run, "samples/digest")]
        for run in (run_dir, folder / "alone")
    ]
    assert digests[0] == digests[1]


@pytest.mark.fault("SIGKILL of a random rank under --max-restarts", times=KILLS)
@pytest.mark.parametrize("ranks", [2, 3] if IS_FULL else [3])
@pytest.mark.timeout(600)
def test_random_ranks_killed_at_random_moments_under_max_restarts(
    ranks: int, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    chance = random.Random(ranks)
    log = tmp_path / "log"
    log.touch()
    words = ["-m", "ddp_trainer", *LONG, f"output_dir={tmp_path}", "name=run"]
    options = [f"--max-restarts={KILLS}"]
    agent = start_launch(words, ranks=ranks, options=options, output=str(log))
    killed = 0
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    while killed < KILLS:
        before = newest_step(run_dir)
        wait_for(lambda: newest_step(run_dir) > before or agent.exitcode is not None)  # noqa: B023 - called at once
        if agent.exitcode is not None:
            break
        time.sleep(chance.uniform(0, 0.3))
        workers = children.read_text().split()
        if len(workers) == ranks:
            os.kill(int(chance.choice(workers)), signal.SIGKILL)
            killed += 1
            wait_for(lambda: children.read_text().split() != workers or agent.exitcode is not None)  # noqa: B023
    agent.join(120)
    assert agent.exitcode == 0, log.read_text()[-5000:]
    assert killed == KILLS, f"the run was over after {killed} kills"
    assert_undisturbed(run_dir, ranks=ranks, folder=tmp_path)


@pytest.mark.fault("SIGKILL of a whole job at a random moment", times=KILLS)
@pytest.mark.parametrize("ranks", [2, 3] if IS_FULL else [3])
@pytest.mark.timeout(600)
def test_the_whole_job_killed_at_random_moments(ranks: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    chance = random.Random(ranks)
    overrides = (*LONG, f"output_dir={tmp_path}", "name=run")
    for _ in range(KILLS):
        kill_in_training(ranks, compose(*overrides), run_dir, after=chance.uniform(0, 0.3))
    train_on(ranks, *overrides, deadline=300)
    assert_undisturbed(run_dir, ranks=ranks, folder=tmp_path)
