"""Losses, and the weights of classes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch
from runs import TINY, read_summary, train_on
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from ddp_trainer.config.errors import USER_ERROR, ConfigError
from ddp_trainer.config.losses import BCEConfig, CrossEntropyConfig, FocalConfig
from ddp_trainer.optim.interfaces import Loss
from ddp_trainer.optim.losses import (
    build_bce,
    build_cross_entropy,
    build_focal,
    class_weights,
    weigh,
)
from ddp_trainer.training.metrics import sum_of_losses

CLASSES = 5
COUNTS = torch.tensor([50, 3, 17, 1, 29])
NAMES = ["a", "b", "c", "d", "e"]


def batch(size: int = 12) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(size)
    logits = torch.randn(size, CLASSES, generator=numbers, dtype=torch.float64) * 4
    return logits, torch.randint(CLASSES, (size,), generator=numbers)


def focal(gamma: float) -> Loss:
    return build_focal(FocalConfig(gamma=gamma), class_counts=None)


def bce() -> Loss:
    return build_bce(BCEConfig(), class_counts=None)


def cross() -> Loss:
    return build_cross_entropy(CrossEntropyConfig(), class_counts=None)


# --- the losses -----------------------------------------------------------------------------------


def test_the_focal_loss_is_that_of_its_definition() -> None:
    logits, labels = batch()
    p = logits.softmax(1)[torch.arange(len(labels)), labels]
    torch.testing.assert_close(focal(2.0)(logits, labels), -((1 - p) ** 2) * p.log())
    torch.testing.assert_close(focal(0.0)(logits, labels), cross()(logits, labels))


def test_the_binary_loss_is_that_of_its_definition() -> None:
    logits, labels = batch()
    p = logits.sigmoid()
    is_class = one_hot(labels, CLASSES).bool()
    expected = torch.where(is_class, -p.log(), -(1 - p).log()).mean(1)
    torch.testing.assert_close(bce()(logits, labels), expected)


@pytest.mark.parametrize("make", [cross, bce, lambda: focal(1.5)])
def test_a_label_is_the_certain_probability_of_its_class(make: Callable[[], Loss]) -> None:
    logits, labels = batch()
    loss = make()
    torch.testing.assert_close(
        loss(logits, labels), loss(logits, one_hot(labels, CLASSES).double())
    )
    mixed = torch.full((len(labels), CLASSES), 1 / CLASSES, dtype=torch.float64)
    every = [loss(logits, torch.full_like(labels, label)) for label in range(CLASSES)]
    torch.testing.assert_close(loss(logits, mixed), torch.stack(every).mean(0))


# --- the weights of classes -----------------------------------------------------------------------


def weights_of(chosen: Any, counts: Tensor | None = COUNTS) -> Tensor:
    weights = class_weights(chosen, counts, NAMES)
    assert weights is not None
    return weights


@pytest.mark.parametrize("chosen", ["balanced", {"b": 7}, {"a": 0.5, "d": 0, "c": 3}])
def test_the_mean_weight_of_the_samples_is_one(chosen: Any) -> None:
    weights = weights_of(chosen)
    assert float(weights @ COUNTS.float()) == pytest.approx(int(COUNTS.sum()))
    if chosen == "balanced":
        torch.testing.assert_close(
            weights * COUNTS, torch.full((CLASSES,), float(COUNTS.sum()) / CLASSES)
        )
    else:
        expected = torch.tensor([float(chosen.get(name, 1)) for name in NAMES])
        torch.testing.assert_close(weights / weights[4], expected)


def test_a_class_without_samples_has_no_weight() -> None:
    weights = weights_of("balanced", torch.tensor([4, 0, 4, 8, 2]))
    assert weights[1] == 0
    assert weights.isfinite().all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_over_ranks_are_those_of_the_closed_formula(world_size: int) -> None:
    logits, labels = batch(13)
    weights = weights_of("balanced").double()
    labels[4] = -1  # a sample without a label
    leaf = logits.clone().requires_grad_()
    for rank in range(world_size):
        share = slice(rank, None, world_size)
        (sum_of_losses(weigh(cross(), weights), leaf[share], labels[share]) / 13).backward()

    p = logits.softmax(1)
    known = (labels >= 0).double()
    factor = weights[labels.clamp(min=0)] * known / 13
    expected = factor[:, None] * (p - one_hot(labels.clamp(min=0), CLASSES))
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-14)
    losses = weigh(cross(), weights)(logits, labels.clamp(min=0))
    theirs = cross_entropy(logits, labels.clamp(min=0), weight=weights, reduction="none")
    torch.testing.assert_close(losses, theirs)


def test_a_mixed_sample_has_the_mean_weight_of_its_classes() -> None:
    logits, _ = batch(2)
    weights = weights_of({"a": 3, "b": 5}).double()
    mixed = torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0, 0.25, 0.75, 0]]).double()
    expected = cross()(logits, mixed) * torch.stack([(weights[0] + weights[1]) / 2, weights[2]])
    torch.testing.assert_close(weigh(cross(), weights)(logits, mixed), expected)


@pytest.mark.parametrize(
    ("chosen", "counts", "message"),
    [
        ("balanced", None, "the data set has no attribute labels"),
        ({"f": 2}, COUNTS, "has the class 'f', and the classes are a, b, c, d, e"),
        (dict.fromkeys(NAMES, 0), COUNTS, "leaves no sample with a weight above 0"),
    ],
)
def test_impossible_weights_are_one_error(chosen: Any, counts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        class_weights(chosen, counts, NAMES)


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["focal", "bce", "cross_entropy"])
def test_a_weighted_loss_is_the_same_at_every_world_size(loss: str, tmp_path: Path) -> None:
    words = (
        *TINY,
        f"loss={loss}",
        "loss.class_weights={class 3: 4, class 5: 0}",
        "data.augment.mixup=0.2",
        "shards=6",
        f"output_dir={tmp_path}",
    )
    hashes = {train_on(size, *words, f"name={size}")["weights_sha256"] for size in (1, 2, 3)}
    plain = train_on(1, *words, "loss.class_weights=none", "name=plain")["weights_sha256"]
    assert len(hashes) == 1
    assert plain not in hashes
    assert read_summary(tmp_path / "1")["steps"] == 16


@pytest.mark.parametrize(
    "value", ["half", "{class 1: -1}", "{class 1: much}", "[1, 2]", "{class 99: 2}"]
)
def test_wrong_weights_on_the_command_line_are_one_line(value: str, tmp_path: Path) -> None:
    done = launch(*TINY, f"loss.class_weights={value}", f"output_dir={tmp_path}")
    assert done.code == USER_ERROR, done.output
    assert done.output.startswith("error: loss.class_weights"), done.output
    assert done.output.count("\n") == 1
