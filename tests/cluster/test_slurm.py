"""launch/slurm.sbatch on a real cluster: the ranks, the arguments and the nodes of a job, and the
failures that no restart can mend.
"""

import re
import socket
import sys
from pathlib import Path

import pytest
from runs import TINY, newest_checkpoint, read_summary, train_on

from cluster.jobs import SCRIPT, Jobs
from cluster.slurm import until

pytestmark = pytest.mark.timeout(900)

# --- ranks, arguments and arrays ------------------------------------------------------------------


def test_a_job_on_two_nodes_trains_with_the_python_of_its_folder(jobs: Jobs) -> None:
    (jobs.folder / ".venv").symlink_to(sys.prefix)
    job = jobs.submit(*TINY, "name=plain", DDP_TRAINER_PYTHON="", VIRTUAL_ENV="", CONDA_PREFIX="")
    output = jobs.finish(job)
    assert "test acc" in output.splitlines()[-2]
    assert not [line for line in output.splitlines() if "warn" in line.lower() or "error" in line]
    assert read_summary(jobs.folder / "plain")["world_size"] == 2


def test_ranks_follow_from_what_the_job_asked_for(jobs: Jobs) -> None:
    asked: dict[str, tuple[tuple[str, ...], dict[str, str], int]] = {
        "gpus": (("--nodes=2", "--gpus-per-node=2"), {}, 4),
        "gpus-by-task": (("--nodes=1", "--ntasks-per-node=2", "--gpus-per-task=1"), {}, 2),
        "tasks": (("--nodes=1", "--ntasks-per-node=2"), {}, 2),
        "cpus": (("--nodes=1", "--cpus-per-task=2"), {}, 1),
        "variable": (("--nodes=1", "--gpus-per-node=2"), {"DDP_TRAINER_RANKS_PER_NODE": "1"}, 1),
    }
    started = [
        jobs.submit(*TINY, f"name={name}", options=options, **extra)
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
    jobs.finish(jobs.submit(*TINY, f"output_dir='{quoted}'", "name=run", options=("--nodes=1",)))
    assert [path.name for path in jobs.folder.iterdir()] == [folder.name]
    assert read_summary(folder / "run")["world_size"] == 1


def test_an_array_is_a_sweep_and_its_jobs_are_requeued_one_by_one(jobs: Jobs) -> None:
    array = jobs.submit(
        *TINY,
        "epochs=40",
        "checkpoint.every_steps=4",
        "seed=0,1",
        "name=sweep",
        options=("--array=0-1", "--nodes=1"),
    )
    until(
        lambda: len(list(jobs.folder.glob("sweep/*/checkpoints/step-*.pt"))) > 0,
        "the sweep trains",
        deadline=240,
    )
    until(lambda: len(jobs.slurm.show(array)) == 2, "all of the sweep run", deadline=240)
    # the one whose own id is the array's
    jobs.slurm.run("scancel", "--signal=USR2", "--batch", f"{array}_1")
    jobs.finish(array)
    restarts = {record["ArrayTaskId"]: record["Restarts"] for record in jobs.slurm.show(array)}
    assert restarts == {"0": "0", "1": "1"}
    runs = sorted((jobs.folder / "sweep").glob("[!.]*"))
    assert [read_summary(run)["steps"] for run in runs] == [320, 320]


# --- nodes that fail their check ------------------------------------------------------------------


def test_after_a_failed_node_check_the_job_is_requeued_and_takes_another_port(jobs: Jobs) -> None:
    job = jobs.submit(*TINY, "name=run", options=("--nodes=2", "--hold"))
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
        *TINY,
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
    words = (*TINY, "name=run", "check.fitness=true")
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
    train_on(1, *TINY, f"output_dir={jobs.folder}", "name=taken", "epochs=1")
    bad = {
        jobs.submit(*TINY, "optimizer.lr=nan"): "error: optimizer.lr=nan must be greater than 0",
        jobs.submit(
            *TINY, "name=taken", "seed=1"
        ): f"error: {jobs.folder}/taken holds a run of another config",
        jobs.submit(
            *TINY, options=("--nodes=1",), DDP_TRAINER_RANKS_PER_NODE="13"
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
        *TINY,
        "name=bad one",
        "optimizer.lr=1e30",
        "scheduler=constant",
        options=("--nodes=1",),
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
    assert f"to start anew with other values: sbatch --nodes=1 {SCRIPT}" in output
    assert r"name=bad\ one" in output
