"""A SLURM job that is stopped gracefully, preempted, suspended, or at its time limit."""

import re
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from processes import PACE, PACING
from runs import assert_bitwise, trained_state

from cluster.jobs import LONG, Jobs
from ddp_trainer.tools.verify import find_damage

pytestmark = pytest.mark.timeout(900)


def test_a_run_stopped_gracefully_twice_ends_as_an_undisturbed_one(
    jobs: Jobs, undisturbed: dict[str, Any]
) -> None:
    job = jobs.submit_long("resume=never")
    # preempts
    stops: list[Callable[[], object]] = [
        lambda: jobs.slurm.run("scancel", "--signal=USR2", "--batch", str(job)),
        lambda: jobs.slurm.submit(
            "--nodes=4", "--exclusive", "--partition=urgent", "--wrap", "hostname"
        ),
    ]
    for number, stop in enumerate(stops, 1):
        jobs.until_it_trains(job, "run")
        stop()
        jobs.until_it_waits(job, restarts=number)
    output = jobs.finish(job)
    assert output.count("stopped gracefully: requeueing job") == 2
    assert output.count("resumed from") == 2  # a run that began anew would end the same
    assert not (jobs.folder / "run" / "stopped").exists()
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)
    assert not any(find_damage(jobs.folder / "run").values())


def test_a_job_that_preemption_cancels_says_how_to_go_on(
    jobs: Jobs, undisturbed: dict[str, Any]
) -> None:
    """PreemptMode=CANCEL: SLURM gives the job its grace time, and does not requeue it."""
    options = ("--nodes=2", "--partition=brief")
    job = jobs.submit_long(options=options)
    jobs.until_it_trains(job, "run")
    jobs.slurm.submit("--nodes=4", "--exclusive", "--partition=urgent", "--wrap", "hostname")
    state = jobs.slurm.wait(job)
    output = jobs.slurm.output(job)
    assert state == "PREEMPTED", output
    [command] = re.findall("to continue, with the same options of sbatch: sbatch (.*)", output)
    assert (jobs.folder / "run/stopped").exists()
    again = jobs.slurm.submit(
        *options[1:],
        *shlex.split(command),
        cwd=jobs.folder,
        DDP_TRAINER_PYTHON=sys.executable,
        **PACING,
    )
    jobs.submitted.append(again)
    jobs.finish(again)
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)


def test_a_suspended_job_goes_on(jobs: Jobs, undisturbed: dict[str, Any]) -> None:
    """PreemptMode=SUSPEND does what scontrol suspend does; here for longer than timeout_seconds."""
    job = jobs.submit_long("timeout_seconds=20")
    jobs.until_it_trains(job, "run")
    jobs.slurm.run("scontrol", "suspend", str(job))
    time.sleep(25)
    jobs.slurm.run("scontrol", "resume", str(job))
    jobs.finish(job)
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)


@pytest.mark.parametrize(("nodes", "min_nodes"), [(1, ""), (2, "1")])
def test_the_time_limit_requeues_and_scancel_does_not(
    nodes: int, min_nodes: str, jobs: Jobs
) -> None:
    job = jobs.submit(
        *LONG,
        "epochs=100000",
        PACE,
        "name=run",
        options=(f"--nodes={nodes}", "--time=1", "--signal=B:USR2@10", "--no-kill"),
        DDP_TRAINER_MIN_NODES=min_nodes,
        **PACING,
    )
    jobs.until_it_waits(job, restarts=1)
    assert (jobs.folder / "run" / "stopped").exists()
    secret = jobs.folder / f".slurm-{job}" / "secret"
    assert (secret.stat().st_mode & 0o777, len(secret.read_text().strip())) == (0o600, 32)
    jobs.slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    jobs.until_it_trains(job, "run")
    jobs.slurm.run("scancel", str(job))
    assert jobs.slurm.wait(job) == "CANCELLED"
    assert jobs.slurm.show(job)[0]["Restarts"] == "1"
    assert jobs.slurm.output(job).count("requeueing") == 1
