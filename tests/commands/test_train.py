"""The command line as a user meets it: help, completion, sweeps, and the same command again."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from processes import clean_environment, launch, run_command, succeed
from runs import TINY, compose, read_summary, records

from ddp_trainer import registry
from ddp_trainer.commands import COMMANDS
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.differences import flatten_keys

DDP_TRAINER = str(Path(sys.executable).with_name("ddp-trainer"))
CHEAP = (*TINY, "epochs=1")
"""8 steps."""


# --- what answers without training ----------------------------------------------------------------


def test_help_lists_the_commands_and_the_choices_of_each_group() -> None:
    text = succeed("--help").output
    assert "torchrun --nproc_per_node=N -m ddp_trainer" in text
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w+", text, re.MULTILINE), command
    for group in registry.GROUPS:
        assert re.search(
            rf"^  {group} +{', '.join(registry.choices(group))}$", text, re.MULTILINE
        ), group


def test_help_of_train_lists_every_key_with_its_default() -> None:
    text = succeed("train", "--help").output
    for key, value in flatten_keys(to_builtins(compose())).items():
        if key.split(".")[-1] != "name" and not isinstance(value, list):
            shown = yaml.safe_dump(value).splitlines()[0]
            assert re.search(rf"^  {re.escape(f'{key}={shown}')}", text, re.MULTILINE), key
    marked = re.findall(r"^(\w+)=(\w+) \(default\)$", text, re.MULTILINE)
    default = to_builtins(compose())
    assert marked == [
        (group, name)
        for group in registry.GROUPS
        for name in ([default[group]["name"]] if "name" in default[group] else default[group])
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(command: str, tmp_path: Path) -> None:
    done = succeed(command, "--help", cwd=tmp_path)
    assert done.output.startswith("usage: ")
    assert (
        f"ddp_trainer {'[train]' if command == 'train' else command}" in done.output.splitlines()[0]
    )
    if command in ("evaluate", "predict"):
        assert "checkpoint=best" in done.output


@pytest.mark.parametrize(
    "flags", [("--help",), ("--hydra-help",), ("--cfg", "job", "model=lenet", "optimizer.lr=0.3")]
)
def test_what_only_answers_creates_nothing_and_imports_no_torch(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [DDP_TRAINER, *flags],
        env=clean_environment(PYTHONPROFILEIMPORTTIME="1"),
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "omegaconf" in imported  # the profile was on
    assert "torch" not in imported
    assert list(tmp_path.iterdir()) == []
    if flags == ("--hydra-help",):
        assert "--multirun" in done.stdout
    if flags[0] == "--cfg":
        shown = OmegaConf.to_container(OmegaConf.create(done.stdout), resolve=True)
        assert shown == to_builtins(compose(*flags[2:]))


@pytest.mark.parametrize(
    "command", [*sorted(COMMANDS.keys() - {"node-check"}), "train --multirun seed=1,2"]
)
def test_without_torch_a_command_works_or_is_one_line(
    command: str, without_torch: dict[str, Any], tmp_path: Path
) -> None:
    error = "ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    (tmp_path / "no/torch/__init__.py").write_text(f"raise {error}")
    (tmp_path / "outputs/run/checkpoints").mkdir(parents=True)
    words = {"evaluate": "outputs/run", "predict": "outputs/run .", "report": "outputs/run"}
    words |= {"export": "outputs/run", "verify": "outputs/run", "freeze": "job.json"}
    words |= {"plan": "bandwidth_mbit=100 latency_us=10"}
    line = [sys.executable, "-m", "ddp_trainer", *command.split(), *words.get(command, "").split()]
    done = run_command(line, cwd=tmp_path, **without_torch)
    if command in ("report", "freeze"):
        assert done.code == 0, done.output
    else:
        text = "error: torch is not installed: pip install torch torchvision\n"
        assert (done.code, done.output) == (1, text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ddp-trainer model=", {f"model={name}" for name in registry.choices("model")}),
        ("ddp-trainer experiment=d", {"experiment=digits_resnet18"}),
        ("ddp-trainer optimizer=adamw optimizer.", {"optimizer.betas.", "optimizer.eps="}),
        ("ddp-trainer global_b", {"global_batch_size="}),
    ],
)
def test_completion_offers_choices_and_keys(
    line: str, expected: set[str], without_torch: dict[str, Any]
) -> None:
    done = run_command(
        [DDP_TRAINER, "-sc", "query=bash"],
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
        **without_torch,
    )
    assert done.code == 0, done.output
    assert expected <= set(done.output.split())


def test_bash_completes_in_a_second_of_cpu_time_after_the_line_that_installs_it() -> None:
    """On a machine that imports Hydra in 0.4 s; a slower one takes as much longer."""
    script = f"""
        PATH="{Path(DDP_TRAINER).parent}:$PATH"
        eval "$(ddp-trainer -sc install=bash)"
        COMP_LINE='ddp-trainer sync=d' COMP_POINT=18 COMP_CWORD=1
        TIMEFORMAT=%U # CPU time, which a busy machine does not change
        for i in 1 2 3; do time {sys.executable} -c "import hydra"; done
        for i in 1 2 3; do time hydra_bash_completion; done && echo "${{COMPREPLY[@]}}"
    """
    *seconds, offered = run_command(["bash", "-c", script]).output.splitlines()
    assert "sync=ddp" in offered.split()
    imports, completions = (min(map(float, part)) for part in (seconds[:3], seconds[3:]))
    assert completions < max(1, 2.5 * imports)


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.mark.fault("--multirun on several ranks")
@pytest.mark.parametrize("ranks", [None, 2])
def test_a_sweep_leaves_a_run_directory_a_job_and_nothing_else(
    ranks: int | None, tmp_path: Path
) -> None:
    sweep = ("seed=0,1", "optimizer.lr=0.01,0.1")
    done = succeed("--multirun", *CHEAP, *sweep, "name=sweep", ranks=ranks, cwd=tmp_path)
    check_table(done.output, tmp_path / "outputs/sweep")
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


def check_table(output: str, folder: Path) -> None:
    """Check that the output ends with a table of the four jobs, the best first."""
    rows = [
        [cell.strip() for cell in line.strip("│┃").split("│" if "│" in line else "┃")]
        for line in output.splitlines()
        if line.startswith(("│", "┃"))
    ]
    assert rows[0] == ["seed", "optimizer.lr", "best eval/top1", "seconds", "run directory"]
    assert {(seed, lr) for seed, lr, *_ in rows[1:]} == {
        (seed, lr) for seed in "01" for lr in ("0.01", "0.1")
    }
    scores = [row[2] for row in rows[1:]]
    assert scores == sorted(scores, reverse=True)
    for _, _, top1, _, path in rows[1:]:
        assert top1 == f"{read_summary(folder.parent.parent / path)['best_top1']:.4f}"
    last = output.splitlines()[-1]
    assert last == "compare the runs: python -m ddp_trainer report outputs/sweep"


@pytest.mark.parametrize(("words", "what"), [(["--multirun"], "not supported"), ([], "for sweeps")])
def test_a_launcher_of_others_is_refused(words: list[str], what: str, tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "hydra" / "launcher"
    folder.mkdir(parents=True)
    target = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    (folder / "mine.yaml").write_text(f"# @package hydra.launcher\n_target_: {target}\n")
    done = launch(
        *words, f"--config-dir={tmp_path}/conf", "hydra/launcher=mine", *CHEAP, cwd=tmp_path
    )
    assert done.code == 2
    assert done.output.startswith(f"error: hydra/launcher=mine is {what}: "), done.output
    assert done.output.count("\n") == 1


# --- the same command again -----------------------------------------------------------------------


def test_max_steps_ends_a_launch_early_and_the_same_command_without_it_resumes(
    tmp_path: Path,
) -> None:
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


def test_resume_never_renames_the_former_run(train_in: Callable[..., Path]) -> None:
    run_dir = train_in("fresh", *CHEAP)
    former = (run_dir / "metrics.jsonl").read_bytes()
    done = succeed(
        *CHEAP, "name=fresh", f"output_dir={run_dir.parent}", "optimizer.lr=0.3", "resume=never"
    )
    [backup] = run_dir.parent.glob("fresh?*")
    assert (backup / "metrics.jsonl").read_bytes() == former
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["optimizer"]["lr"] == 0.3
    assert read_summary(run_dir)["status"] == "finished"
    assert str(backup) in done.output


def test_help_that_is_not_read_to_its_end_is_no_error() -> None:
    script = f"{sys.executable} -m ddp_trainer train --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = run_command(["bash", "-c", script])
    assert done.output.splitlines()[1:] == [str(128 + signal.SIGPIPE)]


def test_refused_launches_with_resume_never_rename_the_former_run_once(
    train_in: Callable[..., Path],
) -> None:
    run_dir = train_in("fresh", *CHEAP)
    former = (run_dir / "metrics.jsonl").read_bytes()
    for _ in range(2):
        weights = "model.weights=/missing.pt"
        words = (*CHEAP, "name=fresh", f"output_dir={run_dir.parent}", weights, "resume=never")
        assert launch(*words).code == 2
    [backup] = run_dir.parent.glob("fresh?*")
    assert (backup / "metrics.jsonl").read_bytes() == former
