"""World-size invariance: the same training at any world size; no host synchronization in a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, compose, newest_checkpoint, on_ranks, read_summary, records, train_on

from ddp_trainer.training.run import run
from ddp_trainer.training.step import TrainStep

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def assert_same_training(one: Path, other: Path) -> None:
    for left, right in zip(records(one, "samples/digest"), records(other, "samples/digest"), strict=True):
        assert left["samples/digest"] == right["samples/digest"]
        assert left["eval/count"] == right["eval/count"]
        assert left["eval/loss"] == pytest.approx(right["eval/loss"], abs=1e-4)
    torch.testing.assert_close(newest_checkpoint(one)["model"], newest_checkpoint(other)["model"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train_on(1, f"output_dir={folder}", "name=alone", "sync=none", *TINY, *AUGMENTED)
    return folder / "alone"


AUGMENTED = ("data.augment.random_crop_padding=2", "data.augment.random_hflip=true", "data.augment.random_erasing=0.5",
             "global_batch_size=13")  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_same_training_at_any_world_size(ranks: int, alone: Path, train_in: Callable[..., Path]) -> None:
    assert_same_training(alone, train_in("many", *TINY, *AUGMENTED, ranks=ranks))


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_same_training_in_microbatches(ranks: int, alone: Path, train_in: Callable[..., Path]) -> None:
    assert_same_training(alone, train_in("micro", *TINY, *AUGMENTED, "gradient_accumulation_steps=3", ranks=ranks))


def test_each_evaluation_sample_counts_once_with_more_ranks_than_samples(
    train_in: Callable[..., Path],
) -> None:
    run_dir = train_in("few", *TINY, "data.num_eval=2", ranks=3)
    assert read_summary(run_dir)["eval/count"] == 2


def test_an_epoch_uses_each_training_sample_once_but_the_dropped_tail(train_in: Callable[..., Path]) -> None:
    run_dir = train_in("ledger", *TINY, "global_batch_size=10", ranks=2)
    assert [record["samples/count"] for record in records(run_dir, "samples/count")] == [90, 90]


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_lenet_on_fashion_mnist_trains_alike_on_one_to_four_ranks(train_in: Callable[..., Path]) -> None:
    overrides = (
        "model=lenet",
        "data=fashion_mnist",
        "precision=fp32",
        "global_batch_size=200",
        "max_steps=25",
    )
    runs = [train_in(f"w{ranks}", *overrides, ranks=ranks) for ranks in (1, 2, 3, 4)]
    for run_dir in runs:
        assert read_summary(run_dir)["eval/count"] == 10_000
    for run_dir in runs[1:]:
        assert_same_training(runs[0], run_dir)


WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "reduce", "gather", "scatter")


def _waits_in_steps(overrides: tuple[str, ...]) -> list[str]:
    """Train with `overrides`; return what in a step waited for the device or, gradients apart, for other ranks."""
    inside, found = [False], []

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
    "extra", [(), ("optimizer=adamw", "max_grad_norm=1", "gradient_accumulation_steps=2"), ("precision=bf16",)]
)
def test_no_step_waits_for_the_device_or_for_other_ranks(extra: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (*TINY, f"output_dir={tmp_path}", "name=run", *extra)
    assert on_ranks(2, _waits_in_steps, overrides) == [[], []]
