"""The built-in metrics, compared with scikit-learn."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from ddp_trainer.config.metrics import (
    AUROCConfig,
    BalancedAccuracyConfig,
    MacroF1Config,
    TopKConfig,
)
from ddp_trainer.scores.metrics import (
    build_auroc,
    build_balanced_accuracy,
    build_macro_f1,
    build_topk,
)

CASES = 1000


def case(number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return probabilities with ties and labels, often without some of the classes."""
    chance = np.random.default_rng(number)
    classes = int(chance.integers(2, 9))
    count = int(chance.integers(1, 60))
    scores = chance.random((count, classes)).astype(np.float32)
    if number % 3 == 0:
        scores = scores.round(1) + np.float32(0.1)
    labels = chance.choice(chance.permutation(classes)[: chance.integers(1, classes + 1)], count)
    return scores / scores.sum(1, keepdims=True), labels


def ours(build: Any, config: Any, number: int) -> float:
    probabilities, labels = case(number)
    return build(config)(torch.from_numpy(probabilities), torch.from_numpy(labels))


@pytest.mark.parametrize("block", range(10))
def test_scores_are_those_of_scikit_learn(block: int) -> None:
    from sklearn import metrics as theirs  # here, because each worker of pytest imports this file

    for number in range(block, CASES, 10):
        probabilities, labels = case(number)
        predictions = torch.from_numpy(probabilities).argmax(1).numpy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes that are only predicted
            balanced = theirs.balanced_accuracy_score(labels, predictions)
            present = np.unique(labels)
            f1 = theirs.f1_score(labels, predictions, average="macro")
        found = ours(build_balanced_accuracy, BalancedAccuracyConfig(), number)
        assert found == pytest.approx(balanced, abs=1e-6)
        assert ours(build_macro_f1, MacroF1Config(), number) == pytest.approx(f1, abs=1e-6)

        areas = [
            theirs.roc_auc_score(labels == label, probabilities[:, label])
            for label in present
            if len(present) > 1
        ]
        area = ours(build_auroc, AUROCConfig(), number)
        assert area == pytest.approx(np.mean(areas) if areas else np.nan, abs=1e-6, nan_ok=True)


def test_a_class_among_the_k_most_probable_ones_counts() -> None:
    for number in range(1, CASES, 3):  # without ties, which have no order
        probabilities, labels = case(number)
        if number % 3 == 0:
            continue
        classes = probabilities.shape[1]
        for k in (1, 2, 5):
            expected = 1.0
            if k < classes:
                ranks = (-probabilities).argsort(1).argsort(1)
                expected = float((ranks[np.arange(len(labels)), labels] < k).mean())
            assert ours(build_topk, TopKConfig(k=k), number) == pytest.approx(expected, abs=1e-6)
