"""Job files: composed once, the same training wherever they are run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import TINY, Finished, assert_bitwise, compose, launch, newest_checkpoint, succeed, train_on

from ddp_trainer.composition import digest, from_builtins, to_builtins
from ddp_trainer.config import SCHEMAS, ConfigError
from ddp_trainer.job import read_job


def freeze(file: Path, *arguments: str) -> Finished:
    return launch("freeze", str(file), *arguments, module="ddp_trainer.job")


CHOICES = [f"{group}={choice}" for group, choices in SCHEMAS.items() for choice in choices]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_config_survives_the_way_through_plain_data(choice: str) -> None:
    config = compose(choice, "checkpoint.every_seconds=2.5", "max_grad_norm=1", "channels_last=false")
    again = from_builtins(json.loads(json.dumps(to_builtins(config))))
    assert again == config
    assert digest(again) == digest(config)


def test_a_job_file_trains_what_the_command_line_would_have(tmp_path: Path) -> None:
    done = freeze(tmp_path / "new/job.json", *TINY, f"output_dir={tmp_path}", "name=frozen", "--world-size=2")
    assert done.code == 0, done.output
    assert done.output.strip() == str(tmp_path / "frozen")
    succeed("run", str(tmp_path / "new/job.json"), module="ddp_trainer.job", ranks=2)
    train_on(2, *TINY, f"output_dir={tmp_path}", "name=direct")
    frozen, direct = newest_checkpoint(tmp_path / "frozen"), newest_checkpoint(tmp_path / "direct")
    for key in ("model", "optimizer", "step"):
        assert_bitwise(frozen[key], direct[key])


def test_a_sweeps_job_is_frozen_with_the_run_directory_that_multirun_gives_it(tmp_path: Path) -> None:
    sweep = ("model=lenet", "seed=1,2", "optimizer.lr=0.1,0.2", f"output_dir={tmp_path}")
    done = freeze(tmp_path / "job.json", *sweep, "--job=2")
    assert done.code == 0, done.output
    config, run_dir = read_job(tmp_path / "job.json")
    assert (config.seed, config.optimizer.lr) == (2, 0.1)
    assert run_dir == tmp_path / "digits-lenet-ddp/model=lenet,optimizer.lr=0.1,seed=2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optimizer.lr=nan"], "optimizer.lr"),
        (["model=lenett"], "model=lenett is unknown"),
        (["--world-size=300"], "global_batch_size=256 must be at least the number of ranks, 300"),
        (["seed=0,1", "--job=2"], "--job=2 is not among the 2 jobs"),
    ],
)
def test_what_cannot_be_frozen_is_one_error(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = freeze(tmp_path / "job.json", *arguments)
    assert done.code == 2
    assert done.output.startswith("error: ")
    assert said in done.output
    assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "job.json").exists()


@pytest.mark.parametrize("text", [None, "", "[]", '{"config": {}}', '{"run_dir": "a", "config": {"model": 1}}'])
def test_what_is_no_job_file_is_one_error(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match="job file"):
        read_job(tmp_path / "job.json")


def test_a_job_file_takes_no_overrides(tmp_path: Path) -> None:
    done = launch("run", str(tmp_path / "job.json"), "seed=3", module="ddp_trainer.job")
    assert done.code == 2
    assert done.output == "error: seed=3: a job file is run as it is, to change it freeze another\n"
