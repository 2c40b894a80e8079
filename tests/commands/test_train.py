"""The command line as a user meets it: help, completion, sweeps, and the same command again."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import TINY, clean_environment, compose, launch, read_summary, records, run_command, succeed

from ddp_trainer import registry
from ddp_trainer.commands import COMMANDS
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import flatten_keys

DDP_TRAINER = str(Path(sys.executable).with_name("ddp-trainer"))
CHEAP = (*TINY, "epochs=1")
"""8 steps."""


# --- what answers without training ----------------------------------------------------------------


def complete(line: str) -> tuple[list[str], float]:
    """Return what Hydra offers after `line`, and the seconds it took."""
    began = time.perf_counter()
    done = run_command([DDP_TRAINER, "-sc", "query=bash"], COMP_LINE=line, COMP_POINT=str(len(line)))
    assert done.code == 0, done.output
    return done.output.split(), time.perf_counter() - began


def test_help_lists_the_commands_and_the_choices_of_each_group() -> None:
    text = succeed("--help").output
    assert "torchrun --nproc_per_node=N -m ddp_trainer" in text
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w+", text, re.MULTILINE), command
    for group in registry.groups():
        assert re.search(rf"^  {group} +{', '.join(registry.choices(group))}$", text, re.MULTILINE), group


def test_help_of_train_lists_every_key_with_its_default() -> None:
    text = succeed("train", "--help").output
    for key, value in flatten_keys(to_builtins(compose())).items():
        if key.split(".")[-1] != "name" and not isinstance(value, list):
            shown = yaml.safe_dump(value).splitlines()[0]
            assert re.search(rf"^  {re.escape(f'{key}={shown}')}", text, re.MULTILINE), key


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(command: str, tmp_path: Path) -> None:
    done = succeed(command, "--help", cwd=tmp_path)
    assert done.output.startswith("usage: ")
    assert f"ddp_trainer {'[train]' if command == 'train' else command}" in done.output.splitlines()[0]


def test_an_unknown_command_is_one_error_with_the_nearest() -> None:
    done = launch("docter")
    assert (done.code, done.output) == (2, "error: docter is not a command: did you mean doctor?\n")


def test_hydra_help_explains_the_flags() -> None:
    text = succeed("--hydra-help").output
    assert "--multirun" in text
    assert "--cfg" in text


def test_cfg_job_shows_the_config_that_would_run() -> None:
    shown = yaml.safe_load(succeed("--cfg", "job", "model=lenet", "optimizer.lr=0.3", "--resolve").output)
    assert shown == to_builtins(compose("model=lenet", "optimizer.lr=0.3"))


def test_looking_creates_nothing(tmp_path: Path) -> None:
    for flags in (["--help"], ["--hydra-help"], ["--cfg", "job"]):
        succeed(*flags, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ddp-trainer model=", {f"model={name}" for name in registry.choices("model")}),
        ("ddp-trainer experiment=d", {"experiment=digits_resnet18"}),
        ("ddp-trainer optimizer=adamw optimizer.", {"optimizer.betas.", "optimizer.eps="}),
        ("ddp-trainer global_b", {"global_batch_size="}),
    ],
)
def test_completion_offers_choices_and_keys(line: str, expected: set[str]) -> None:
    assert expected <= set(complete(line)[0])


def test_bash_completes_after_the_line_that_installs_it() -> None:
    script = f"""
        PATH="{Path(DDP_TRAINER).parent}:$PATH"
        eval "$(ddp-trainer -sc install=bash)"
        COMP_LINE='ddp-trainer sync=d' COMP_POINT=18 COMP_CWORD=1
        hydra_bash_completion && echo "${{COMPREPLY[@]}}"
    """
    done = run_command(["bash", "-c", script])
    assert "sync=ddp" in done.output.split()


def test_completion_takes_less_than_a_second() -> None:
    assert min(complete("ddp-trainer model=")[1] for _ in range(3)) < 1


@pytest.mark.parametrize("flags", [("--help",), ("--cfg", "job"), ("-sc", "query=bash")], ids=lambda flags: flags[0])
def test_what_only_answers_imports_no_torch(flags: tuple[str, ...]) -> None:
    environment = clean_environment(PYTHONPROFILEIMPORTTIME="1", COMP_LINE="ddp-trainer model=")
    done = subprocess.run(
        [DDP_TRAINER, *flags], env=environment, text=True, capture_output=True, timeout=60, check=True
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "omegaconf" in imported  # the profile was on
    assert "torch" not in imported


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_sweep_leaves_a_run_directory_a_job_and_nothing_else(ranks: int | None, tmp_path: Path) -> None:
    sweep = ("seed=0,1", "optimizer.lr=0.01,0.1")
    succeed("--multirun", *CHEAP, *sweep, "name=sweep", ranks=ranks, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    outputs = tmp_path / "outputs"
    assert [path.name for path in outputs.iterdir() if path.is_dir()] == ["sweep"]
    jobs = [path for path in (outputs / "sweep").iterdir() if path.is_dir()]
    assert len(jobs) == 4
    configs = [yaml.safe_load((job / "config.yaml").read_text()) for job in jobs]
    assert {(config["seed"], config["optimizer"]["lr"]) for config in configs} == {
        (seed, lr) for seed in (0, 1) for lr in (0.01, 0.1)
    }
    for job in jobs:
        assert read_summary(job)["steps"] == 8
        assert read_summary(job)["world_size"] == (ranks or 1)


# --- the same command again -----------------------------------------------------------------------


def test_max_steps_ends_a_launch_early_and_the_same_command_without_it_resumes(tmp_path: Path) -> None:
    run_dir = tmp_path / "outputs" / "again"
    command = (*CHEAP, "name=again")

    succeed(*command, "max_steps=5", cwd=tmp_path)
    assert read_summary(run_dir)["steps"] == 5
    assert read_summary(run_dir)["status"] == "max_steps"
    assert (run_dir / "checkpoints" / "step-00000005.pt").is_file()
    assert records(run_dir, "eval/top1")[-1]["step"] == 5

    succeed(*command, cwd=tmp_path)
    assert read_summary(run_dir)["steps"] == 8
    assert read_summary(run_dir)["status"] == "finished"
    first = (run_dir / "summary.json").read_bytes()
    history = (run_dir / "metrics.jsonl").read_bytes()

    repeated = succeed(*command, cwd=tmp_path).output
    assert re.search("finished|nothing left", repeated), repeated
    assert f"test acc {read_summary(run_dir)['eval/top1']:.4f}" in repeated
    assert (run_dir / "summary.json").read_bytes() == first
    assert (run_dir / "metrics.jsonl").read_bytes() == history


def test_resume_must_refuses_when_there_is_nothing_to_resume(tmp_path: Path) -> None:
    done = launch(*CHEAP, "name=none", "resume=must", cwd=tmp_path)
    assert done.code == 2
    assert "resume=must" in done.output
    assert "Traceback" not in done.output


def test_resume_never_renames_the_former_run(train_in: Callable[..., Path]) -> None:
    run_dir = train_in("fresh", *CHEAP)
    former = (run_dir / "metrics.jsonl").read_bytes()
    done = succeed(*CHEAP, "name=fresh", f"output_dir={run_dir.parent}", "optimizer.lr=0.3", "resume=never")
    [backup] = run_dir.parent.glob("fresh?*")
    assert (backup / "metrics.jsonl").read_bytes() == former
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["optimizer"]["lr"] == 0.3
    assert read_summary(run_dir)["status"] == "finished"
    assert str(backup) in done.output
