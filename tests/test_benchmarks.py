"""The benchmarks read what runs write."""

import importlib
from pathlib import Path

import pytest
from image_sets import write_fashion_mnist

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


@pytest.mark.parametrize("name", ["ddp_trainer", "plain DDP"])
def test_a_trainer_is_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_fashion_mnist(tmp_path)
    monkeypatch.syspath_prepend(FOLDER)
    compare = importlib.import_module("compare")
    measured = compare.run_trainer(compare.Job(**JOB, data=data), name, workers=0)
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
