"""The metrics that a run can compute in addition to loss and accuracy (the group ``metric``)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ddp_trainer.config.metrics import BalancedAccuracyConfig, MacroF1Config

Metric = Callable[[Tensor, Tensor], float]
"""A function of the probabilities, float32 [N, C], and the labels, int64 [N], of all samples."""


def build_balanced_accuracy(config: BalancedAccuracyConfig) -> Metric:
    """Return a function that returns the mean of the recalls of all classes that have samples."""

    def balanced_accuracy(probabilities: Tensor, labels: Tensor) -> float:
        correct, support, _ = counts(probabilities, labels)
        recalls = correct / support
        return float(recalls[support > 0].mean())

    return balanced_accuracy


def build_macro_f1(config: MacroF1Config) -> Metric:
    """Return a function that returns the mean F1 of all classes that have samples."""

    def macro_f1(probabilities: Tensor, labels: Tensor) -> float:
        correct, support, predicted = counts(probabilities, labels)
        scores = 2 * correct / (support + predicted)
        return float(scores[support > 0].mean())

    return macro_f1


def counts(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return samples by class, float64 [C] each: correct, by true and by predicted class."""
    num_classes = probabilities.shape[1]
    predictions = probabilities.argmax(1)
    correct, support, predicted = (
        torch.bincount(classes, minlength=num_classes).double()
        for classes in (labels[labels == predictions], labels, predictions)
    )
    return correct, support, predicted
