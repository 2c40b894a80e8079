"""Job files: composed once, the same training wherever they are run."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from processes import launch, succeed
from runs import TINY, assert_bitwise, compose, newest_checkpoint, train_on

from ddp_trainer import registry
from ddp_trainer.commands import freeze
from ddp_trainer.config.composition import config_digest, from_builtins, to_builtins
from ddp_trainer.config.errors import ConfigError, TransientError
from ddp_trainer.config.schema import Resume
from ddp_trainer.launchers.job_file import read_job, write_job

CHOICES = [f"{group}={choice}" for group in registry.GROUPS for choice in registry.choices(group)]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_config_survives_the_way_through_plain_data(choice: str) -> None:
    config = compose(
        choice, "checkpoint.every_seconds=2.5", "max_grad_norm=1", "channels_last=false"
    )
    again = from_builtins(json.loads(json.dumps(to_builtins(config))))
    assert again == config
    assert config_digest(again) == config_digest(config)


def test_a_job_file_trains_what_the_command_line_would_have(tmp_path: Path) -> None:
    file = tmp_path / "new=1" / "job: #1.json"
    done = launch(
        "freeze", str(file), *TINY, f"output_dir={tmp_path}", "name=frozen", "world_size=2"
    )
    assert done.code == 0, done.output
    assert done.output.strip() == str(tmp_path / "frozen")
    succeed("train", f"job_file={file}", ranks=2)
    train_on(2, *TINY, f"output_dir={tmp_path}", "name=direct")
    frozen = newest_checkpoint(tmp_path / "frozen")
    direct = newest_checkpoint(tmp_path / "direct")
    for key in ("model", "optimizer", "step"):
        assert_bitwise(frozen[key], direct[key])


def test_a_sweeps_job_has_the_run_directory_of_multirun_and_can_be_changed_into_another(
    tmp_path: Path,
) -> None:
    sweep = (
        "model=lenet",
        "seed=1,2",
        "optimizer.lr=0.1,0.2",
        f"output_dir={tmp_path}",
        "resume=never",
    )
    succeed("freeze", f"{tmp_path}/old.json", *sweep, "job=2")
    old, run_dir = read_job(tmp_path / "old.json")
    assert (old.seed, old.optimizer.lr) == (2, 0.1)
    assert run_dir == tmp_path / "digits-lenet-ddp/model=lenet,optimizer.lr=0.1,seed=2"
    done = succeed(
        "freeze", f"{tmp_path}/new.json", f"base={tmp_path}/old.json", "world_size=2", "resume=auto"
    )
    assert done.output.strip() == str(run_dir)
    assert read_job(tmp_path / "new.json") == (replace(old, resume=Resume.auto), run_dir)


NEW = ("freeze", "{folder}/new.json", "output_dir={folder}")
BASE = ("freeze", "{folder}/new.json", "base={folder}/base")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((*NEW, "optimizer.lr=nan"), "optimizer.lr=nan "),
        ((*NEW, "model=lenett"), "model=lenett "),
        ((*NEW, "world_size=300"), "global_batch_size=256 must be at least the world size, 300"),
        ((*NEW, "world_size=two"), "world_size=two "),
        ((*NEW, "seed=0,1", "job=2"), "job=2 is not among the 2 jobs"),
        (
            ("freeze", "{folder}/new.json", "--multirun", "seed=0,1"),
            "a job file holds one job, not 2: ",
        ),
        (("freeze", "seed=1"), "FILE is missing: freeze FILE [key=value …]"),
        ((*BASE, "job=0"), "job=0 chooses a job of a sweep, and base= has one job: leave one out"),
        ((*BASE, "epoch=3"), "epoch=3 is unknown"),
        ((*BASE, "epochs=x"), "epochs=x must be a whole number"),
        ((*BASE, "epochs=0"), "epochs=0 must be greater than 0"),
        ((*BASE, "optimizer=adamw"), "optimizer=adamw would replace a whole section: "),
        ((*BASE, "logger.jsonl=null"), "logger.jsonl=null would replace a whole section: "),
        ((*BASE, "epochs=[1"), "epochs=[1 cannot be read: the value must be YAML"),
        ((*BASE, "world_size=257"), "global_batch_size=256 must be at least the world size, 257"),
        (("train", "job_file={folder}/base", "seed=3"), "seed=3 "),
    ],
)
def test_what_cannot_be_frozen_or_changed_is_one_error(
    arguments: list[str], error: str, tmp_path: Path
) -> None:
    write_job(tmp_path / "base", to_builtins(compose()), tmp_path / "run")
    done = launch(*(argument.format(folder=tmp_path) for argument in arguments))
    assert done.code == 2
    assert done.output.startswith(f"error: {error}")
    assert done.output.count("\n") == 1
    assert not (tmp_path / "new.json").exists()


def test_a_disk_that_is_full_may_have_space_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(SystemExit, match=r"^1$"):
            freeze.main([f"{tmp_path}/new.json"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.endswith(
        "/new.json cannot be written: File too large: name another job file\n"
    )
    assert not [*tmp_path.iterdir()]


def test_a_job_file_that_cannot_be_read_now_may_be_readable_later() -> None:
    with pytest.raises(
        TransientError, match=r"^job_file=/proc/self/mem cannot be read \(Input/output error\): "
    ):
        read_job(Path("/proc/self/mem"))


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"config": {}}', '{"run_dir": "a", "config": {"model": 1}}']
)
def test_what_is_no_job_file_is_one_error(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match="job_file="):
        read_job(tmp_path / "job.json")
