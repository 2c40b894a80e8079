"""The examples as a user runs them, `launch`, and code of a user that is wrong."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from processes import (
    end_with_descendants,
    launch,
    processes_with,
    run_command,
    start_command,
    succeed,
    torchrun,
    wait_for,
)
from runs import (
    TINY,
    assert_bitwise,
    newest_step,
    read_summary,
    records,
    trained_state,
)

from ddp_trainer.config.errors import USER_ERROR

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def with_path(*folders: Path) -> str:
    """Return a PYTHONPATH that begins with `folders` and the project."""
    already = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), str(ROOT), already])


def plugins(names: str, folder: Path = EXAMPLES) -> dict[str, Any]:
    """Return the environment variables with which a command loads modules of `folder`."""
    return {"DDP_TRAINER_PLUGINS": names, "PYTHONPATH": with_path(folder)}


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]


# --- as scripts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs_as_a_script(script: Path, tmp_path: Path) -> None:
    assert len(script.read_text().splitlines()) <= 60
    done = run_command(
        [sys.executable, str(script)], cwd=tmp_path, deadline=180, PYTHONPATH=with_path()
    )
    assert done.code == 0, done.output
    top1 = re.search(r"top-1 ([01]\.\d+)", done.output)
    [run_dir] = [path for path in (tmp_path / "outputs").iterdir() if path.is_dir()]
    summary = read_summary(run_dir)
    assert summary["world_size"] == 2
    if script.stem == "own_observer":
        assert summary["status"] == "stopped_early"
        assert summary["stop_reason"] in done.output
    else:
        assert summary["status"] == "finished"
        assert top1, done.output
        assert float(top1[1]) == pytest.approx(summary["eval/top1"], abs=1e-4)
        chance = 0.5 if script.stem == "own_dataset" else 0.1
        assert summary["eval/top1"] > 1.5 * chance


def test_finetune_trains_scores_exports_and_reports(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        (pictures / name).mkdir(parents=True)
        for number in range(15):
            image = Image.new("RGB", (40, 36 + number), colour)
            image.save(pictures / name / f"{number}.png")
    run_dir = tmp_path / "runs" / "pets"
    words = ["model=lenet", "data.image_size=32", "epochs=1", "global_batch_size=8"]
    variables = {"PYTHON": sys.executable, "RUN": str(run_dir), "PYTHONPATH": with_path()}
    port = torchrun(1)[6].partition("=")[2]
    done = run_command(
        ["bash", str(EXAMPLES / "finetune.sh"), str(pictures), "null", *words],
        cwd=tmp_path,
        deadline=180,
        PORT=port,
        **variables,
    )
    assert done.code == 0, done.output
    assert read_summary(run_dir)["world_size"] == 2
    for name in ("evaluation", "export", "report.html"):
        assert (run_dir / name).exists(), name


# --- on the command line --------------------------------------------------------------------------

OWN = "own_dataset,own_loss,own_metric,own_observer"
ALL_OWN = (
    "data=bars",
    "model=lenet",
    "loss=own_focal",
    "metric=[own_balanced]",
    "observer=[stop_below]",
    "observer.stop_below.loss=1000",
    "observer.stop_below.windows=75",  # at 2 steps a window: it stops after step 150
    "log_every_steps=2",
    "epochs=20",
    "global_batch_size=48",  # 10 steps an epoch
    "checkpoint.every_steps=3",
    "precision=fp32",
    "num_threads=1",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with all own parts on 2 ranks; return the run directory."""
    folder = tmp_path_factory.mktemp("own")
    succeed(*ALL_OWN, f"output_dir={folder}", "name=whole", ranks=2, cwd=folder, **plugins(OWN))
    return folder / "whole"


def test_own_parts_that_are_killed_and_resumed_end_as_if_left_alone(whole: Path) -> None:
    folder = whole.parent
    killed = folder / "killed"
    words = ["-m", "ddp_trainer", *ALL_OWN, f"output_dir={folder}", "name=killed"]
    process = start_command([*torchrun(2), *words], cwd=folder, **plugins(OWN))
    try:
        wait_for(lambda: newest_step(killed))
        for rank in children_of(process):
            os.kill(rank, signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        end_with_descendants(process)
    assert process.returncode == 1
    assert newest_step(killed) < 150
    succeed(*words[2:], ranks=2, cwd=folder, **plugins(OWN))

    assert "resumed from" in (killed / "train.log").read_text()
    assert_bitwise(trained_state(whole), trained_state(killed))
    for tag in ("train/loss", "eval/own_balanced"):
        values = [[one[tag] for one in records(run, tag)] for run in (whole, killed)]
        assert values[0], tag
        assert values[0] == values[1], tag
    ends = [
        {key: read_summary(run)[key] for key in ("status", "stop_reason", "steps")}
        for run in (whole, killed)
    ]
    assert ends[0] == ends[1]


def test_a_stop_of_an_observer_is_final_until_the_observer_changes(whole: Path) -> None:
    first = read_summary(whole)
    assert (first["status"], first["steps"]) == ("stopped_early", 150)
    assert re.fullmatch(r"the loss 0\.\d+ is below 1000\.0", first["stop_reason"])

    command = (*ALL_OWN, f"output_dir={whole.parent}", "name=whole")
    repeated = succeed(*command, ranks=2, cwd=whole.parent, **plugins(OWN))
    assert "nothing left to train" in repeated.output
    assert f"test acc {first['eval/top1']:.4f}" in repeated.output
    assert read_summary(whole) == first

    changed = "observer.stop_below.loss=1e-9"
    succeed(*command, changed, ranks=2, cwd=whole.parent, **plugins(OWN))
    last = read_summary(whole)
    assert (last["status"], last["stop_reason"], last["steps"]) == ("finished", None, 200)


# --- what a user sees of own parts ----------------------------------------------------------------


def test_help_lists_own_parts_without_torch() -> None:
    """The examples import torch themselves, so that only the lists are compared."""
    text = succeed("--help", **plugins(OWN)).output
    keys = succeed("train", "--help", **plugins(OWN)).output
    for group, name in (
        ("data", "bars"),
        ("loss", "own_focal"),
        ("metric", "own_balanced"),
        ("observer", "stop_below"),
    ):
        assert re.search(rf"^  {group} .*\b{name}\b", text, re.MULTILINE), group
        assert f"\n{group}={name}\n" in keys
    assert re.search(r"^  observer\.stop_below\.windows=2 +So many log", keys, re.MULTILINE)
    assert re.search(r"^  loss\.gamma=2\.0 +Exponent", keys, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss=own_focal", "loss.gama=1"], "loss.gama=1 is unknown: did you mean loss.gamma?"),
        (["loss=own_focal", "loss.gamma=much"], "loss.gamma=much must be a number"),
        (
            ["observer=[stop_below]", "observer.stop_below.windows=1.5"],
            "observer.stop_below.windows=1.5 must be a whole number",
        ),
        (["observer=[stop_bellow]"], "observer=stop_bellow is not a valid choice: choose from "),
        (["metric=[own_balance]"], "metric=own_balance is not a valid choice: choose from "),
    ],
)
def test_wrong_keys_of_own_parts_are_one_error(words: list[str], message: str) -> None:
    done = launch(*words, **plugins(OWN))
    assert (done.code, done.output.count("\n")) == (USER_ERROR, 1), done.output
    assert done.output.startswith(f"error: {message}"), done.output


BROKEN = """
from dataclasses import dataclass

from ddp_trainer import (
    LossConfig, MetricConfig, Observer, ObserverConfig,
    register_loss, register_metric, register_observer,
)


@dataclass(kw_only=True)
class MeanConfig(LossConfig):
    name: str = "mean"


@register_loss("mean", MeanConfig)
def build_mean(config, *, class_counts):
    from torch.nn.functional import cross_entropy
    return cross_entropy


@dataclass(kw_only=True)
class TextConfig(MetricConfig):
    name: str = "text"


@register_metric("text", TextConfig)
def build_text(config):
    return lambda probabilities, labels: "high"


@dataclass(kw_only=True)
class DivideConfig(ObserverConfig):
    name: str = "divide"
    event: str = "on_step"
    rank: int = 0


@register_observer("divide", DivideConfig)
class Divide(Observer):
    def __init__(self, config):
        self.config = config

    def fail(self, run, event):
        if (event, run.world.rank) == (self.config.event, self.config.rank):
            1 / 0

    def on_step(self, run):
        self.fail(run, "on_step")

    def on_evaluation(self, run):
        self.fail(run, "on_evaluation")

    def on_end(self, run):
        self.fail(run, "on_end")

    def state_dict(self):
        return {"values": 1 / 0} if self.config.event == "state_dict" else {}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the plug-in broken.py."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.py").write_text(BROKEN)
    return folder


def test_a_loss_that_returns_one_number_is_one_error(broken: Path) -> None:
    done = launch(*TINY, "loss=mean", cwd=broken, **plugins("broken", broken))
    assert done.code == USER_ERROR, done.output
    assert done.output.splitlines()[-1].startswith(
        "error: loss=mean must return one value per sample, a tensor of the shape [2] here"
    )


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["metric=[text]"], "MetricError: metric=text failed (ValueError: could not convert"),
        *(
            (
                [
                    "observer=[divide]",
                    f"observer.divide.event={event}",
                    f"observer.divide.rank={rank}",
                ],
                f"ObserverError: observer=divide failed in {event} (ZeroDivisionError: division",
            )
            for event, rank in (("on_step", 1), ("on_evaluation", 0), ("on_end", 1))
        ),
    ],
)
def test_own_code_that_raises_ends_the_job_with_its_name(
    words: list[str], cause: str, broken: Path, tmp_path: Path
) -> None:
    done = launch(*TINY, *words, ranks=2, cwd=tmp_path, **plugins("broken", broken))
    assert done.code == 1, done.output
    assert cause in done.output
    assert done.output.count(f"{cause.partition(':')[0]}: ") == 1, done.output


# --- launch() -------------------------------------------------------------------------------------

JOB = """
import sys

from broken import DivideConfig
from ddp_trainer import Config, ConfigError, LaunchError, launch
from ddp_trainer.config.data import SyntheticConfig
from ddp_trainer.config.models import LeNetConfig

KINDS = {
    "large": {"global_batch_size": 97},
    "divide": {"observer": {"divide": DivideConfig(rank=1)}},
    "long": {"epochs": 100_000},
    "resumed": {"epochs": 100_000, "max_steps": int(sys.argv[-1])},
}

if __name__ == "__main__":
    data = SyntheticConfig(num_train=96, num_eval=31, height=12, width=12)
    plain = {"model": LeNetConfig(), "data": data, "global_batch_size": 12, "name": "run"}
    try:
        summary = launch(Config(**plain | KINDS[sys.argv[1]]), num_ranks=2)
        print("summary", summary.status, summary.steps)
    except (ConfigError, LaunchError) as error:
        print("raised", type(error).__name__, error)
"""


@pytest.fixture
def job(tmp_path: Path, broken: Path) -> list[str]:
    """Return the words that start a script, which calls `launch` on 2 ranks."""
    (tmp_path / "job.py").write_text(JOB)
    return [sys.executable, str(tmp_path / "job.py")]


def test_an_error_in_a_rank_is_raised_by_launch(
    job: list[str], broken: Path, tmp_path: Path
) -> None:
    path = with_path(broken)
    wrong = run_command([*job, "large", "0"], cwd=tmp_path, PYTHONPATH=path)
    assert wrong.output == (
        "raised ConfigError global_batch_size=97 must be at most the number of training samples,"
        " 96\n"
    )
    failed = run_command([*job, "divide", "0"], cwd=tmp_path, PYTHONPATH=path)
    assert "raised LaunchError rank 1 on " in failed.output
    cause = "observer=divide failed in on_step (ZeroDivisionError: division by zero)"
    assert cause in failed.output


def test_an_interrupted_launch_is_saved_and_goes_on(
    job: list[str], broken: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "outputs" / "run"
    process = start_command([*job, "long", "0"], cwd=tmp_path, PYTHONPATH=with_path(broken))
    try:
        wait_for(lambda: newest_step(run_dir))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        end_with_descendants(process)
    step = newest_step(run_dir)
    assert process.returncode == 0, output
    assert output.endswith(f"summary stopped {step}\n")
    assert read_summary(run_dir)["status"] == "stopped"

    words = [*job, "resumed", str(step + 20)]
    resumed = run_command(words, cwd=tmp_path, PYTHONPATH=with_path(broken))
    assert resumed.output.endswith(f"summary max_steps {step + 20}\n"), resumed.output
    assert f"step-{step:08d}.pt (epoch " in resumed.output


def test_no_rank_outlives_a_launching_process_that_was_killed(
    job: list[str], broken: Path, tmp_path: Path
) -> None:
    mark = f"THIS_TEST={tmp_path}"
    process = start_command(
        [*job, "long", "0"], cwd=tmp_path, PYTHONPATH=with_path(broken), THIS_TEST=str(tmp_path)
    )
    try:
        wait_for(lambda: newest_step(tmp_path / "outputs" / "run"))
        assert len(processes_with(mark)) >= 3
        process.kill()
        process.wait(timeout=30)
        wait_for(lambda: not processes_with(mark), seconds=30)
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)
