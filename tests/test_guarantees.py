"""World-size invariance: the same training at any world size; no host synchronization in a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_ranks
from runs import TINY, compose, newest_checkpoint, read_summary, records, train_all

from ddp_trainer.training.step import TrainStep
from ddp_trainer.training_run import run

JOBS = {
    "whole": (),
    "microbatches": ("gradient_accumulation_steps=3",),
    "few": ("data.num_eval=2", "max_steps=1"),  # fewer evaluation samples than ranks
}


def assert_same_training(one: Path, other: Path) -> None:
    for left, right in zip(
        records(one, "samples/digest"), records(other, "samples/digest"), strict=True
    ):
        assert left["samples/digest"] == right["samples/digest"]
        assert left["eval/count"] == right["eval/count"]
        assert left["eval/loss"] == pytest.approx(right["eval/loss"], abs=1e-4)
    torch.testing.assert_close(newest_checkpoint(one)["model"], newest_checkpoint(other)["model"])


def train_jobs(ranks: int, folder: Path, *extra: str) -> None:
    common = (
        *TINY,
        "data.augment.random_crop_padding=2",
        "data.augment.random_hflip=true",
        "data.augment.random_erasing=0.5",
        "global_batch_size=13",
        f"output_dir={folder}",
        *extra,
    )
    train_all(ranks, [(*common, *job, f"name={name}") for name, job in JOBS.items()])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train_jobs(1, folder, "sync=none")
    return folder / "whole"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_same_training_at_any_world_size(ranks: int, alone: Path, tmp_path: Path) -> None:
    train_jobs(ranks, tmp_path)
    for name in ("whole", "microbatches"):
        assert_same_training(alone, tmp_path / name)
        counts = [record["samples/count"] for record in records(tmp_path / name, "samples/count")]
        # each of the 96 samples once, but the tail, which fills no batch of 13
        assert counts == [
            91,
            91,
        ]
    assert read_summary(tmp_path / "few")["eval/count"] == 2


WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "reduce", "gather", "scatter")


def _waits_in_steps(overrides: tuple[str, ...]) -> list[str]:
    """Train with `overrides`; return what in a step waited for the device or, gradients apart, for
    other ranks.
    """
    inside = [False]
    found = []

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if inside[0]:
                found.append(name)
            return original(*args, **options)

        setattr(owner, name, call)

    for name in WAITS:
        watched(torch.Tensor, name)
    for name in COLLECTIVES:
        watched(torch.distributed, name)
    take_step = TrainStep.__call__

    def step(self: TrainStep, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inside[0] = True
        loss = take_step(self, images, labels)
        inside[0] = False
        return loss

    TrainStep.__call__ = step
    run(compose(*overrides))
    return found


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("optimizer=adamw", "max_grad_norm=1", "gradient_accumulation_steps=2"),
        ("precision=bf16",),
    ],
)
def test_no_step_waits_for_the_device_or_for_other_ranks(
    extra: tuple[str, ...], tmp_path: Path
) -> None:
    overrides = (*TINY, f"output_dir={tmp_path}", "name=run", *extra)
    assert on_ranks(2, _waits_in_steps, overrides) == [[], []]
