"""launch/slurm.sbatch on a real cluster: what it makes of a job, and what becomes of a run that is
disturbed.
"""

import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import (
    TINY,
    assert_bitwise,
    newest_checkpoint,
    newest_step,
    read_summary,
    train_on,
    trained_state,
)

from cluster.slurm import SlurmCluster, until
from ddp_trainer.tools.verify import find_damage

SCRIPT = str(Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch")
SHORT = (*TINY, "num_threads=1")
LONG = (*SHORT, "epochs=150", "checkpoint.every_steps=4")
"""1,200 steps: time enough to be disturbed several times."""

pytestmark = pytest.mark.timeout(900)


class Jobs:
    """Submits the script from an empty folder, below which the runs go."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.submitted: list[int] = []

    def submit(
        self, *overrides: str, options: tuple[str, ...] = ("--nodes=2",), **extra: str
    ) -> int:
        words = (*options, SCRIPT, f"output_dir={self.folder}", *overrides)
        environment = {"DDP_TRAINER_PYTHON": sys.executable} | extra
        self.submitted.append(self.slurm.submit(*words, cwd=self.folder, **environment))
        return self.submitted[-1]

    def finish(self, job: int) -> str:
        """Wait until the job is over, fail the test unless all went well, and return what was
        printed.
        """
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of LONG on two ranks without a disturbance."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_on(2, *LONG, f"output_dir={folder}", "name=alone", deadline=600)
    return trained_state(folder / "alone")


# --- what a job gives -----------------------------------------------------------------------------


def test_a_job_on_two_nodes_trains_with_the_python_of_its_folder(jobs: Jobs) -> None:
    (jobs.folder / ".venv").symlink_to(sys.prefix)
    job = jobs.submit(*SHORT, "name=plain", DDP_TRAINER_PYTHON="", VIRTUAL_ENV="", CONDA_PREFIX="")
    output = jobs.finish(job)
    assert "test acc" in output.splitlines()[-2]
    assert not [line for line in output.splitlines() if "warn" in line.lower() or "error" in line]
    assert read_summary(jobs.folder / "plain")["world_size"] == 2


def test_ranks_follow_from_what_the_job_asked_for(jobs: Jobs) -> None:
    asked: dict[str, tuple[tuple[str, ...], dict[str, str], int]] = {
        "gpus": (("--nodes=2", "--gpus-per-node=2"), {}, 4),
        "gpus-by-task": (("--nodes=1", "--ntasks-per-node=2", "--gpus-per-task=1"), {}, 2),
        "tasks": (("--nodes=1", "--ntasks-per-node=3"), {}, 3),
        "cpus": (("--nodes=1", "--cpus-per-task=2"), {}, 1),
        "variable": (("--nodes=1", "--gpus-per-node=1"), {"DDP_TRAINER_RANKS_PER_NODE": "2"}, 2),
    }
    started = [
        jobs.submit(*SHORT, f"name={name}", options=options, **extra)
        for name, (options, extra, _) in asked.items()
    ]
    for job in started:
        jobs.finish(job)
    assert {name: read_summary(jobs.folder / name)["world_size"] for name in asked} == {
        name: ranks for name, (_, _, ranks) in asked.items()
    }


def test_hostile_arguments_reach_hydra_unchanged(jobs: Jobs) -> None:
    folder = jobs.folder / 'it\'s: $(touch owned) `id` "q" * ~ \\t; & #\n-- end'
    quoted = str(folder).replace("'", "\\'")
    jobs.finish(jobs.submit(*SHORT, f"output_dir='{quoted}'", "name=run", options=("--nodes=1",)))
    assert [path.name for path in jobs.folder.iterdir()] == [folder.name]
    assert read_summary(folder / "run")["world_size"] == 1


def test_an_array_is_a_sweep_and_its_jobs_are_requeued_one_by_one(jobs: Jobs) -> None:
    sweep = ("seed=0,1", "optimizer.lr=0.1,0.2")
    array = jobs.submit(
        *SHORT,
        "epochs=40",
        "checkpoint.every_steps=4",
        *sweep,
        "name=sweep",
        options=("--array=0-3", "--nodes=1"),
    )
    until(
        lambda: len(list(jobs.folder.glob("sweep/*/checkpoints/step-*.pt"))) > 0,
        "the sweep trains",
        deadline=240,
    )
    until(lambda: len(jobs.slurm.show(array)) == 4, "all of the sweep run", deadline=240)
    # the one whose own id is the array's
    jobs.slurm.run("scancel", "--signal=USR2", "--batch", f"{array}_3")
    jobs.finish(array)
    restarts = {record["ArrayTaskId"]: record["Restarts"] for record in jobs.slurm.show(array)}
    assert restarts == {"0": "0", "1": "0", "2": "0", "3": "1"}
    runs = sorted((jobs.folder / "sweep").glob("[!.]*"))
    assert len(runs) == 4
    assert [read_summary(run)["steps"] for run in runs] == [320] * 4


# --- a run that is disturbed ----------------------------------------------------------------------


def test_a_run_stopped_gracefully_three_times_ends_as_an_undisturbed_one(
    jobs: Jobs, undisturbed: dict[str, Any]
) -> None:
    job = jobs.submit(*LONG, "name=run", "resume=never")
    # preempts
    stops: list[Callable[[], object]] = [
        lambda: jobs.slurm.run("scancel", "--signal=USR2", "--batch", str(job)),
        lambda: jobs.slurm.submit(
            "--nodes=4", "--exclusive", "--partition=urgent", "--wrap", "hostname"
        ),
        lambda: jobs.slurm.run("scancel", "--signal=USR2", "--batch", str(job)),
    ]
    for number, stop in enumerate(stops, 1):
        jobs.until_it_trains(job, "run")
        stop()
        jobs.until_it_waits(job, restarts=number)
    output = jobs.finish(job)
    assert output.count("stopped gracefully: requeueing job") == 3
    assert not (jobs.folder / "run" / "stopped").exists()
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)
    assert not any(find_damage(jobs.folder / "run").values())


def test_a_job_that_preemption_cancels_says_how_to_go_on(
    jobs: Jobs, undisturbed: dict[str, Any]
) -> None:
    """PreemptMode=CANCEL: SLURM gives the job its grace time, and does not requeue it."""
    options = ("--nodes=2", "--partition=brief")
    job = jobs.submit(*LONG, "name=run", options=options)
    jobs.until_it_trains(job, "run")
    jobs.slurm.submit("--nodes=4", "--exclusive", "--partition=urgent", "--wrap", "hostname")
    state = jobs.slurm.wait(job)
    output = jobs.slurm.output(job)
    assert state == "PREEMPTED", output
    [command] = re.findall("to continue, with the same options of sbatch: sbatch (.*)", output)
    assert (jobs.folder / "run/stopped").exists()
    again = jobs.slurm.submit(
        *options[1:], *shlex.split(command), cwd=jobs.folder, DDP_TRAINER_PYTHON=sys.executable
    )
    jobs.submitted.append(again)
    jobs.finish(again)
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)


def test_a_suspended_job_goes_on(jobs: Jobs, undisturbed: dict[str, Any]) -> None:
    """PreemptMode=SUSPEND does what scontrol suspend does; here for longer than timeout_seconds."""
    job = jobs.submit(*LONG, "name=run", "timeout_seconds=20")
    jobs.until_it_trains(job, "run")
    jobs.slurm.run("scontrol", "suspend", str(job))
    time.sleep(25)
    jobs.slurm.run("scontrol", "resume", str(job))
    jobs.finish(job)
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)


@pytest.mark.parametrize("number", [0, 1])
def test_the_loss_of_a_node_loses_nothing(
    jobs: Jobs, undisturbed: dict[str, Any], number: int
) -> None:
    """Node 0 runs the batch script and rank 0's store, node 1 only its rank."""
    job = jobs.submit(*LONG, "name=run")
    jobs.until_it_trains(job, "run")
    node = jobs.slurm.run(
        "scontrol", "show", "hostnames", jobs.slurm.show(job)[0]["NodeList"]
    ).split()[number]
    jobs.slurm.kill_node(node)
    try:
        jobs.finish(job)
    finally:
        jobs.slurm.start_node(node)
        until(lambda: jobs.slurm.node_state(node) == "IDLE", f"{node} is back", deadline=120)
    assert jobs.slurm.show(job)[0]["Restarts"] == "1"
    assert_bitwise(trained_state(jobs.folder / "run"), undisturbed)
    assert not any(find_damage(jobs.folder / "run").values())


@pytest.mark.parametrize("min_nodes", ["", "1"])
def test_the_time_limit_requeues_and_scancel_does_not(min_nodes: str, jobs: Jobs) -> None:
    job = jobs.submit(
        *LONG,
        "epochs=100000",
        "name=run",
        options=("--nodes=2", "--time=1", "--signal=B:USR2@10", "--no-kill"),
        DDP_TRAINER_MIN_NODES=min_nodes,
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


def test_after_a_failed_node_check_the_job_is_requeued_and_takes_another_port(jobs: Jobs) -> None:
    job = jobs.submit(*SHORT, "name=run", options=("--nodes=2", "--hold"))
    port = 15000 + 10 * job % 15000  # the script's choice for the first start
    with socket.create_server(("127.0.0.1", port)):
        jobs.slurm.run("scontrol", "release", str(job))
        output = jobs.finish(job)
    assert jobs.slurm.show(job)[0]["Restarts"] == "1"
    assert f"port {port} is taken on the head" in output
    assert output.count("failed (exit code 1): requeueing job") == 1


def test_a_node_that_computes_wrong_numbers_is_excluded_when_the_job_is_requeued(
    jobs: Jobs,
) -> None:
    flaky = jobs.slurm.nodes[1]
    plugin = {
        "DDP_TRAINER_PLUGINS": "flaky_node",
        "FLAKY_NODE": flaky,
        "PYTHONPATH": str(Path(__file__).parent),
    }
    words = (
        *SHORT,
        "epochs=4",
        "checkpoint.every_steps=2",
        "check.every_steps=1",
        "check.on_corruption=exclude",
    )
    job = jobs.submit(*words, "name=run", options=("--nodes=3",), **plugin)
    output = jobs.finish(job)
    assert f"CorruptionError: rank 1 on {socket.gethostname()} computed another gradient" in output
    assert (jobs.folder / "run" / "excluded_nodes").read_text().split() == [flaky]
    [record] = jobs.slurm.show(job)
    assert (record["ExcNodeList"], record["Restarts"]) == (flaky, "1"), output
    assert (
        newest_checkpoint(jobs.folder / "run")["step"] == read_summary(jobs.folder / "run")["steps"]
    )


@pytest.mark.alone
def test_a_slow_node_is_excluded_before_the_job_trains(jobs: Jobs) -> None:
    slow = jobs.slurm.nodes[1]
    program = jobs.folder / "python"
    program.write_text(
        f"#!{sys.executable}\n" + Path(__file__).with_name("slow_node.py").read_text()
    )
    program.chmod(0o755)
    words = (*SHORT, "name=run", "check.fitness=true")
    job = jobs.submit(
        *words, options=("--nodes=2",), DDP_TRAINER_PYTHON=str(program), SLOW_NODE=slow
    )
    output = jobs.finish(job)
    found = re.findall(
        r"error: node 1 reaches (\d+) % of the median of the other nodes in its (\w+ \w+)", output
    )
    assert found, output
    assert all(60 <= int(share) < 85 for share, _ in found), output
    assert (jobs.folder / "run" / "excluded_nodes").read_text().split() == [slow]
    [record] = jobs.slurm.show(job)
    assert (record["ExcNodeList"], record["Restarts"]) == (slow, "1"), output
    assert "failed (exit code 1): requeueing job" in output


# --- what no restart can mend ---------------------------------------------------------------------


def test_bad_input_is_one_error_and_no_requeue(jobs: Jobs) -> None:
    train_on(1, *SHORT, f"output_dir={jobs.folder}", "name=taken", "epochs=1")
    bad = {
        jobs.submit(*SHORT, "optimizer.lr=nan"): "error: optimizer.lr=nan must be greater than 0",
        jobs.submit(
            *SHORT, "name=taken", "seed=1"
        ): f"error: {jobs.folder}/taken holds a run of another config",
        jobs.submit(
            *SHORT, options=("--nodes=1",), DDP_TRAINER_RANKS_PER_NODE="13"
        ): "error: global_batch_size=12",
    }
    for job, error in bad.items():
        assert jobs.slurm.wait(job) == "FAILED"
        [record] = jobs.slurm.show(job)
        output = jobs.slurm.output(job)
        assert (record["ExitCode"], record["Restarts"]) == ("2:0", "0"), output
        lines = [
            line
            for line in output.splitlines()
            if not line.startswith(("srun: ", "slurmstepd-", "node "))
        ]
        assert lines[0].startswith(error)
        # What only the ranks can see a second node repeats, if the first one takes 5 s to be gone.
        assert lines == lines[:1] or ("holds a run" in error and lines == lines[:1] * 2)
    assert not list(jobs.folder.glob(".slurm-*"))


def test_a_job_that_always_fails_is_given_up(jobs: Jobs) -> None:
    job = jobs.submit(
        *SHORT,
        "name=bad one",
        "optimizer.lr=1e30",
        "scheduler=constant",
        DDP_TRAINER_MAX_RESTARTS="1",
    )
    assert jobs.slurm.wait(job, deadline=400) == "FAILED"
    [record] = jobs.slurm.show(job)
    output = jobs.slurm.output(job)
    assert (record["ExitCode"], record["Restarts"]) == ("1:0", "1"), output
    assert output.count("requeueing job") == 1
    assert output.splitlines()[-1].startswith(
        "slurm.sbatch: gave up: 2 starts in a row have made no checkpoint"
    )
    assert f"to start anew with other values: sbatch --nodes=2 {SCRIPT}" in output
    assert r"name=bad\ one" in output
