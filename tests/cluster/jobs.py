"""Jobs of launch/slurm.sbatch on the cluster of a test session."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import PACE, PACING
from runs import TINY, newest_step, train_on, trained_state

from cluster.slurm import SlurmCluster, until

SCRIPT = str(Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch")
LONG = (*TINY, "epochs=60", "checkpoint.every_steps=4")
"""480 steps, which are slow until the test has disturbed the job, see `Jobs.submit_long`."""


class Jobs:
    """Submits the script from an empty folder, below which the runs go."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.is_slow = folder / "slow"
        self.submitted: list[int] = []

    def submit(
        self, *overrides: str, options: tuple[str, ...] = ("--nodes=2",), **extra: str
    ) -> int:
        words = (*options, SCRIPT, f"output_dir={self.folder}", *overrides)
        environment = {"DDP_TRAINER_PYTHON": sys.executable} | extra
        self.submitted.append(self.slurm.submit(*words, cwd=self.folder, **environment))
        return self.submitted[-1]

    def submit_long(self, *overrides: str, options: tuple[str, ...] = ("--nodes=2",)) -> int:
        """Submit `LONG` as the run "run", whose steps take 0.1 s until `finish` is called."""
        self.is_slow.touch()
        pace = (PACE, f"observer.pace.file={self.is_slow}")
        return self.submit(*LONG, *pace, "name=run", *overrides, options=options, **PACING)

    def finish(self, job: int) -> str:
        """Wait until the job is over, fail the test unless all went well, and return what was
        printed.
        """
        self.is_slow.unlink(missing_ok=True)
        state = self.slurm.wait(job, deadline=600)
        output = self.slurm.output(job)
        assert state == "COMPLETED", output
        for record in self.slurm.show(job):
            assert not list(self.folder.rglob(f".slurm-{record['JobId']}"))
        return output

    def until_it_trains(self, job: int, name: str) -> None:
        """Wait until there is a checkpoint that was not there before."""
        before = newest_step(self.folder / name)
        until(
            lambda: (
                newest_step(self.folder / name) > before
                and self.slurm.show(job)[0]["JobState"] == "RUNNING"
            ),
            f"{name} has a checkpoint after step {before}",
            deadline=240,
            report=lambda: self.slurm.output(job),
        )

    def until_it_waits(self, job: int, restarts: int) -> None:
        """Wait until the job is back in the queue after so many starts, and let it begin soon."""
        said = ["PENDING", "BeginTime", str(restarts)]
        until(
            lambda: (
                [self.slurm.show(job)[0][key] for key in ("JobState", "Reason", "Restarts")] == said
            ),
            f"job {job} is in the queue again",
            deadline=240,
            report=lambda: self.slurm.output(job),
        )
        self.slurm.hasten(self.slurm.show(job)[0])


@pytest.fixture
def jobs(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(slurm, tmp_path)
    yield jobs
    slurm.run("scancel", *map(str, jobs.submitted))  # those of a test that failed


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of LONG on two ranks without a disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_on(2, *LONG, f"output_dir={folder}", "name=alone", deadline=600)
    return trained_state(folder / "alone")
