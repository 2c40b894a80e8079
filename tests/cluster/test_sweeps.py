"""Sweeps by launchers: on a real SLURM cluster, and under Optuna."""

import signal
import sqlite3
import sys
from pathlib import Path

import pytest
import yaml
from processes import launch, start_command, succeed
from runs import read_summary

from cluster.slurm import SlurmCluster, until
from cluster.test_launchers import CHEAP, assert_same_sweeps, run_dirs

pytestmark = pytest.mark.timeout(900)

ON_SLURM = ("--multirun", "hydra/launcher=slurm", "hydra.launcher.poll_seconds=0.5")


def test_each_job_is_an_sbatch_with_the_result_of_a_plain_torchrun(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    sweep = (*CHEAP, "optimizer.lr=0.05,0.1", f"output_dir={tmp_path}")
    done = succeed(
        *ON_SLURM,
        "hydra.launcher.nodes=2",
        "hydra.launcher.time=0:30:00",
        *sweep,
        "name=own",
        cwd=tmp_path,
        deadline=600,
        SLURM_CONF=str(slurm.config),
    )
    succeed("--multirun", *sweep, "name=plain", ranks=2, deadline=300)
    assert_same_sweeps(tmp_path)
    assert done.output.count(": SLURM job ") == 2
    assert done.output.count(": done") == 2


def test_ctrl_c_leaves_the_jobs_to_slurm_and_the_same_command_waits(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    arguments = [
        *ON_SLURM,
        "hydra.launcher.sbatch_args=[--hold]",
        *CHEAP,
        "global_batch_size=97,12",
        f"output_dir={tmp_path}",
        "name=a",
    ]
    command = [sys.executable, "-m", "ddp_trainer", *arguments]
    process = start_command(command, cwd=tmp_path, SLURM_CONF=str(slurm.config))
    try:
        until(lambda: len(held(slurm)) == 2, "both jobs are in the queue")
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    ids = held(slurm)
    assert process.returncode == 1
    assert f"scancel {' '.join(ids)} ends them, and the same command waits for them" in output

    for job_id in ids:
        slurm.run("scontrol", "release", job_id)
    done = launch(*arguments, cwd=tmp_path, deadline=600, SLURM_CONF=str(slurm.config))
    assert done.code == 1, done.output
    assert [f"already in SLURM as {job_id}" in done.output for job_id in ids] == [
        True,
        True,
    ], done.output
    [line] = [line for line in done.output.splitlines() if line.startswith("1 of 2 jobs failed: ")]
    assert f"job 0 (global_batch_size=97) in {tmp_path}/a/" in line
    assert ": global_batch_size=97 " in line
    assert [read_summary(path)["status"] for path in run_dirs(tmp_path / "a").values()] == [
        "finished"
    ]


def held(slurm: SlurmCluster) -> list[str]:
    return sorted(
        slurm.run("squeue", "--noheader", "--states=PENDING", "--format=%i").split(), key=int
    )


def test_what_sbatch_refuses_is_one_error(slurm: SlurmCluster, tmp_path: Path) -> None:
    arguments = (
        *ON_SLURM,
        "hydra.launcher.partition=nowhere",
        *CHEAP,
        f"output_dir={tmp_path}",
        "seed=0,1",
    )
    done = launch(*arguments, cwd=tmp_path, deadline=120, SLURM_CONF=str(slurm.config))
    assert done.code == 2
    assert done.output.startswith("error: hydra/launcher=slurm: sbatch: error: ")
    assert "partition" in done.output
    assert done.output.count("\n") == 1


def test_optuna_sweeps_over_jobs_with_a_torchrun_each(tmp_path: Path) -> None:
    succeed(
        "--multirun",
        "hydra/launcher=torchrun",
        "hydra.launcher.nproc_per_node=1",
        "hydra.launcher.max_parallel=2",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.direction=maximize",
        "hydra.sweeper.sampler.seed=1",
        "hydra.sweeper.sampler.n_startup_trials=2",
        "hydra.sweeper.study_name=a",
        f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db",
        "model=lenet",
        "epochs=3",
        "device=cpu",
        "optimizer.lr=interval(0.001,0.3)",
        "scheduler=constant,cosine",
        f"output_dir={tmp_path}",
        "name=tuned",
        deadline=600,
    )
    summaries = {
        yaml.safe_load((run_dir / "config.yaml").read_text())["optimizer"]["lr"]: read_summary(
            run_dir
        )
        for run_dir in run_dirs(tmp_path / "tuned").values()
    }
    assert [summary["world_size"] for summary in summaries.values()] == [1] * 4
    top1 = {lr: summary["best_top1"] for lr, summary in summaries.items()}
    with sqlite3.connect(tmp_path / "study.db") as study:
        trials = study.execute(
            "select trial_params.param_value, trial_values.value from trial_params join"
            " trial_values using (trial_id) where trial_params.param_name = 'optimizer.lr'"
        ).fetchall()
    assert sorted(trials) == [pytest.approx(pair) for pair in sorted(top1.items())]
    results = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert (
        results["best_value"] == max(top1.values()) == top1[results["best_params"]["optimizer.lr"]]
    )
    assert len(set(top1.values())) > 1  # or any trial would do as the best
