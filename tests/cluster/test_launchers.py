"""Sweeps whose jobs are torchruns of their own: the plain sweep's results, each job on its own
feet.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import launch, start_command, succeed, wait_for
from runs import TINY, assert_bitwise, compose, newest_checkpoint, read_summary, train_on

from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.config.schema import Device
from ddp_trainer.launchers.sweeps import slurm
from ddp_trainer.launchers.sweeps.base import Job, last_error
from ddp_trainer.training.summary import Summary
from hydra_plugins.ddp_trainer import SlurmLauncher, TorchrunLauncher

CHEAP = (*TINY, "epochs=1", "device=cpu")
"""8 steps; as many threads however many jobs share the cores."""


def own_torchrun(**options: int) -> list[str]:
    """Return the arguments that give each job a torchrun of its own."""
    return [
        "--multirun",
        "hydra/launcher=torchrun",
        *(f"hydra.launcher.{key}={n}" for key, n in options.items()),
    ]


def run_dirs(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if not path.name.startswith(".")}


def assert_same_sweeps(folder: Path) -> None:
    """Compare the sweeps "own" and "plain" in `folder`, of two jobs on two ranks."""
    own = run_dirs(folder / "own")
    plain = run_dirs(folder / "plain")
    assert len(own) == 2
    assert own.keys() == plain.keys()
    for name in own:
        assert read_summary(own[name])["world_size"] == 2
        for key in ("model", "optimizer", "step", "best_top1"):
            assert_bitwise(newest_checkpoint(own[name])[key], newest_checkpoint(plain[name])[key])


def test_each_job_is_a_torchrun_with_the_result_that_it_has_under_a_plain_one(
    tmp_path: Path,
) -> None:
    sweep = (*CHEAP, "optimizer.lr=0.05,0.1", f"output_dir={tmp_path}")
    succeed(*own_torchrun(nproc_per_node=2, max_parallel=2), *sweep, "name=own", deadline=240)
    succeed("--multirun", *sweep, "name=plain", ranks=2, deadline=240)
    assert_same_sweeps(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"own", "plain", "multirun.yaml"}


def test_jobs_that_fail_do_not_end_the_others_and_are_named_in_one_line(tmp_path: Path) -> None:
    done = launch(
        *own_torchrun(nproc_per_node=1, max_parallel=2),
        *CHEAP,
        f"output_dir={tmp_path}",
        "name=a",
        "optimizer.lr=1e9,0.1",
        "global_batch_size=97,12",
        deadline=240,
    )
    assert done.code == 1, done.output
    finished = [
        path.name for path in run_dirs(tmp_path / "a").values() if (path / "summary.json").exists()
    ]
    assert len(finished) == 1
    [line] = [line for line in done.output.splitlines() if line.startswith("3 of 4 jobs failed: ")]
    for job in (
        "0 (global_batch_size=97 optimizer.lr=1000000000.0)",
        "1 (global_batch_size=97 optimizer.lr=0.1)",
    ):
        assert f"job {job} in {tmp_path}/a/" in line
    assert line.count(": global_batch_size=97 ") == 2
    assert line.count(": DivergedError: the loss or gradient of step ") == 1
    assert "Traceback" not in done.output.partition("3 of 4 jobs failed")[2]
    assert "Error executing job" not in done.output


def test_jobs_that_cannot_run_are_refused_at_once_and_the_others_run(tmp_path: Path) -> None:
    sweep = (
        *CHEAP,
        f"output_dir={tmp_path}",
        "name=a",
        "gradient_accumulation_steps=13,1",
        "log_every_steps=3,4,3",
    )
    done = launch(*own_torchrun(nproc_per_node=1), *sweep, deadline=240)
    assert done.code == 1, done.output
    *refusals, start = done.output.splitlines()[:4]
    assert all(line.startswith("error: ") for line in refusals), done.output
    assert (
        " cannot run: gradient_accumulation_steps=13 must be at most global_batch_size=12"
        in refusals[0]
    )
    assert start.startswith("job 3 (")
    # the sixth is the fourth again: one job, one result
    assert done.output.count("3 of 6 jobs failed: ") == 1
    assert [read_summary(path)["status"] for path in run_dirs(tmp_path / "a").values()] == [
        "finished",
        "finished",
    ]


REFUSED = {
    "gradient_accumulation_steps=13,14": (
        "gradient_accumulation_steps=13 must be at most global_batch_size=12"
    ),
    "hydra.launcher.nproc_per_node=13": (
        "global_batch_size=12 must be at least the world size, 13: "
    ),
    "hydra.launcher.max_parallel=0": "hydra.launcher.max_parallel=0 must be greater than 0",
    "hydra.launcher.nproc=2": "",
    "optimizer.lr=0.1,x": "",
    "hydra/launcher=torchrum": "",
    "hydra/launcher=torchrun": (
        "hydra/launcher=torchrun is for sweeps: add --multirun, or leave it out\n"
    ),
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_sweep_of_which_nothing_can_run_is_one_error(override: str, tmp_path: Path) -> None:
    sweep = [] if override == "hydra/launcher=torchrun" else own_torchrun()
    done = launch(*sweep, *CHEAP, f"output_dir={tmp_path}", override)
    assert done.code == 2
    assert done.output.startswith(f"error: {REFUSED[override]}"), done.output
    assert done.output.count("\n") == 1


def test_under_torchrun_a_launcher_is_refused_once(tmp_path: Path) -> None:
    done = launch(*own_torchrun(), *CHEAP, f"output_dir={tmp_path}", "seed=0,1", ranks=2)
    assert done.code == 1  # torchrun's own
    assert done.output.count("error: hydra/launcher=torchrun starts a torchrun for each job: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_saves_the_running_job_and_starts_no_other(tmp_path: Path) -> None:
    sweep = [
        *own_torchrun(nproc_per_node=2),
        *CHEAP,
        "epochs=10000",
        f"output_dir={tmp_path}",
        "name=a",
        "seed=0,1",
    ]
    process = start_command([sys.executable, "-m", "ddp_trainer", *sweep])
    try:
        wait_for(lambda: list(tmp_path.glob("a/*/checkpoints/step-*.pt")), seconds=120)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert output.endswith("stopped, 0 of 2 jobs are done: the same command continues\n"), output
    [run_dir] = run_dirs(tmp_path / "a").values()
    assert (run_dir / "stopped").exists()
    assert newest_checkpoint(run_dir)["step"] == read_summary(run_dir)["steps"]


def on_gpus(
    count: int, *, nproc_per_node: int | None = None, max_parallel: int = 1
) -> TorchrunLauncher:
    launcher = TorchrunLauncher(nproc_per_node, max_parallel)
    launcher.gpus = [str(number) for number in range(count)]
    return launcher


def test_gpus_are_split_between_the_jobs_at_a_time_and_a_job_on_cpus_takes_none() -> None:
    launcher = on_gpus(8, max_parallel=3)
    assert [launcher.gpus_of(Device.auto, slot) for slot in range(3)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]
    assert launcher.gpus_of(Device.cpu, 0) == []
    assert launcher.world_size(Device.auto) == 2
    assert on_gpus(8).world_size(Device.auto) == 8
    assert on_gpus(8, nproc_per_node=3).world_size(Device.auto) == 3
    launcher = on_gpus(2, max_parallel=3)
    assert launcher.world_size(Device.cpu) >= 1
    with pytest.raises(
        ConfigError, match=r"^hydra\.launcher\.max_parallel=3 must be at most the number of GPUs, 2"
    ):
        launcher.world_size(Device.auto)


def test_the_cause_is_the_last_error_in_the_output(tmp_path: Path) -> None:
    (log := tmp_path / "log").write_text(
        "a\nerror: first\nerror: lr=1 is not valid\nno error: here\n"
    )
    assert last_error(log) == "lr=1 is not valid"
    assert last_error(tmp_path / "none") is None


def jobs_in(folder: Path, count: int) -> list[Job]:
    config = compose(f"output_dir={folder}")
    return [
        Job(number=n, label=f"job {n}", config=config, run_dir=folder / str(n), overrides=[])
        for n in range(count)
    ]


def test_a_job_that_slurm_does_not_take_does_not_end_the_sweep(tmp_path: Path, monkeypatch) -> None:
    ids = ["7"]

    def answer(*command: str) -> str:
        if command[0] == "squeue":
            return ""  # the job has ended
        if not ids:
            raise TransientError("sbatch has not answered for 120 s")
        return ids.pop()

    monkeypatch.setattr(slurm, "slurm", answer)
    submitted, refused = jobs = jobs_in(tmp_path, 2)
    SlurmLauncher([], 0.01, nodes=1).run(jobs)
    assert "summary.json cannot be used" in str(submitted.result)
    assert "sbatch has not answered for 120 s" in str(refused.result)


class Printer(TorchrunLauncher):
    """A launcher whose torchrun only prints."""

    def start(self, job: Job, slot: int, log: Path) -> subprocess.Popen[bytes]:
        with open(log, "wb") as output:
            return subprocess.Popen(["printf", "first\nlast"], stdout=output)


def test_a_last_line_without_a_newline_is_printed(tmp_path: Path, capsys) -> None:
    Printer(1, 1).run_job(jobs_in(tmp_path, 1)[0], 0, tmp_path)
    assert capsys.readouterr().out == "first\nlast"


def test_a_damaged_summary_is_the_failure_of_its_job(tmp_path: Path) -> None:
    job = Job(number=0, label="job 0", config=compose(*TINY), run_dir=tmp_path, overrides=[])
    (tmp_path / "summary.json").write_text("{")
    job.finish(None)
    assert str(job.result).startswith(f"job 0 in {tmp_path}: summary.json cannot be used: ")


def test_the_summary_of_an_earlier_launch_is_not_the_result_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = Summary.from_json(
        json.dumps(train_on(1, *CHEAP, f"output_dir={tmp_path}", "name=run"))
    )
    path = tmp_path / "run/summary.json"
    old = time.time() - 100
    os.utime(path, (old, old))
    monkeypatch.setattr(slurm, "slurm", lambda *command: "7" if command[0] == "sbatch" else "")
    [job] = jobs_in(tmp_path, 1)
    job.run_dir = path.parent
    SlurmLauncher([], 0.01, nodes=1).run([job])  # SLURM no longer knows how the job ended
    assert "summary.json cannot be used: it is that of an earlier launch" in str(job.result)
    # a job of an earlier command, which has waited in SLURM since then
    job_file, _ = slurm.files_of(job)
    os.utime(job_file, (old - 100, old - 100))
    SlurmLauncher([], 0.01, nodes=1).submit(job, {job_file.stem: "7"})
    job.finish(None)
    assert job.result == summary.best_top1
