"""The benchmarks read what runs write."""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from image_sets import write_fashion_mnist
from runs import compose

FOLDER = Path(__file__).parents[1] / "benchmarks"
JOB = {
    "model": "lenet",
    "ranks": 1,
    "global_batch_size": 64,
    "steps": 6,
    "window": 2,
    "precision": "fp32",
    "device": "cpu",
}


def test_a_peer_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_fashion_mnist(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    compare = importlib.import_module("compare")
    measured = compare.run_trainer(compare.Job(**JOB, data=data), "plain DDP", workers=0)
    assert measured["images_per_second"] > 0
    assert measured["first_step_seconds"] > 0


def test_a_step_without_its_timer_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_fashion_mnist(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    ablation = importlib.import_module("ablation")
    compare = importlib.import_module("compare")
    choice = next(choice for choice in ablation.CHOICES if choice.name == "no step timer")
    assert ablation.rate(compare.Job(**JOB, data=data), choice) > 0


def commands_for_a_gpu() -> list[list[str]]:
    """Return the commands that benchmarks/gpu.sh would run."""
    script = FOLDER / "gpu.sh"
    environment = os.environ | {"DRY_RUN": "1"}
    output = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in output.stdout.splitlines()]


def test_every_command_for_a_gpu_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    commands = commands_for_a_gpu()
    trainings = [words for words in commands if "torch.distributed.run" in words]
    for words in trainings:
        compose(*words[words.index("ddp_trainer") + 1 :])
    scripts = [words for words in commands if words[1].startswith("benchmarks/")]
    for _, script, *options in scripts:
        module = importlib.import_module(Path(script).stem)
        if hasattr(module, "parse"):
            monkeypatch.setattr(sys, "argv", [script, *options])
            module.parse()
    assert len(trainings) >= 5
    assert len(scripts) >= 6
    others = [words[1:3] for words in commands if words not in trainings + scripts]
    assert others == [["-m", "ddp_trainer"], ["-m", "pytest"]]


def test_the_share_of_the_time_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    gpu_steps = importlib.import_module("gpu_steps")
    spans = [(0.0, 10.0), (4.0, 6.0), (11.0, 20.0), (30.0, 40.0)]  # two overlap
    shares = gpu_steps.idle_share(spans)
    assert shares["idle_share"] == pytest.approx(11 / 40)
    assert shares["launch_gaps"] == pytest.approx(10 / 40)  # a gap of 1 µs is no launch
