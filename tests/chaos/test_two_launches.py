"""Two launches and more in one run directory: one wins, whatever they ask for and in whatever order
they come.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import trials
from processes import forkserver
from runs import compose

from ddp_trainer.checkpoint import run_dir as run_dirs
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.config.schema import Resume

TRIALS = trials(50, full=200)
LAUNCHES = 3


def launch_again_and_again(number: int, folder: Path, barrier: Any, results: Any) -> None:
    """Try to get each trial's directory at the same time as the other processes; report who has got
    it.
    """
    run_dirs.LOCK_SECONDS = 0.05
    config = to_builtins(compose())
    rng = random.Random(number)
    for trial in range(TRIALS):
        run_dir = folder / str(trial)
        resume = rng.choice(list(Resume))
        delay = rng.random() / 100
        barrier.wait()
        time.sleep(delay)
        try:
            with run_dirs.lock_run_dir(run_dir, config, resume=resume):
                (run_dir / "checkpoints").mkdir(exist_ok=True)
                (run_dir / "checkpoints" / f"step-{number}.pt").touch()
                results.put((trial, number))
                barrier.wait()  # holds the lock until the others have given up
        except (ConfigError, TransientError):
            barrier.wait()


@pytest.mark.fault("three launches at once in one directory", times=TRIALS)
def test_one_of_several_launches_in_a_directory_wins(tmp_path: Path) -> None:
    context = forkserver()
    barrier = context.Barrier(LAUNCHES, timeout=60)
    results = context.Queue()
    for trial in range(0, TRIALS, 2):  # in every other there is something to rename, or to resume
        (tmp_path / str(trial) / "checkpoints").mkdir(parents=True)
        (tmp_path / str(trial) / "checkpoints" / "step-0.pt").touch()
    processes = [
        context.Process(target=launch_again_and_again, args=(number, tmp_path, barrier, results))
        for number in range(LAUNCHES)
    ]
    for process in processes:
        process.start()
    # in a few all ask for resume=must of nothing
    winners = [results.get(timeout=120)[0] for _ in range(TRIALS - 4)]
    for process in processes:
        process.join(timeout=60)
    while not results.empty():
        winners.append(results.get()[0])
    assert [process.exitcode for process in processes] == [0] * LAUNCHES
    assert len(winners) == len(set(winners))
