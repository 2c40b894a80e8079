"""The metrics that a run can compute in addition to loss and accuracy (the group ``metric``)."""

import torch
from torch import Tensor

from ddp_trainer.config.metrics import (
    AUROCConfig,
    BalancedAccuracyConfig,
    MacroF1Config,
    TopKConfig,
)
from ddp_trainer.training.evaluation import Metric


def build_balanced_accuracy(config: BalancedAccuracyConfig) -> Metric:
    """Return the metric balanced accuracy: the mean recall over all classes that have samples."""

    def balanced_accuracy(probabilities: Tensor, labels: Tensor) -> float:
        correct, support, _ = counts(probabilities, labels)
        return float((correct / support)[support > 0].mean())

    return balanced_accuracy


def build_macro_f1(config: MacroF1Config) -> Metric:
    """Return the metric macro F1: the mean F1 score over the classes with samples or predictions.

    The F1 score of a class that is predicted and has no sample is 0, as in scikit-learn.
    """

    def macro_f1(probabilities: Tensor, labels: Tensor) -> float:
        correct, support, predicted = counts(probabilities, labels)
        total = support + predicted
        return float((2 * correct / total)[total > 0].mean())

    return macro_f1


def build_topk(config: TopKConfig) -> Metric:
    """Return a function for the share of samples whose class is among the k most probable ones."""

    def topk(probabilities: Tensor, labels: Tensor) -> float:
        k = min(config.k, probabilities.shape[1])
        found = probabilities.topk(k).indices == labels[:, None]
        return float(found.any(1).double().mean())

    return topk


def build_auroc(config: AUROCConfig) -> Metric:
    """Return a function for the area under the ROC curve, each class against the rest.

    It returns the mean over classes, without those of which there is no sample, or no sample of
    another class; NaN if none is left.
    """

    def auroc(probabilities: Tensor, labels: Tensor) -> float:
        areas = [
            area_under_roc(scores, labels == label)
            for label, scores in enumerate(probabilities.T.double())
            if 0 < int((labels == label).sum()) < len(labels)
        ]
        return sum(areas) / len(areas) if areas else float("nan")

    return auroc


def area_under_roc(scores: Tensor, is_positive: Tensor) -> float:
    """Return the probability that a positive sample has a higher score than a negative one.

    Equal scores count half. scores: float64 [N]. is_positive: bool [N].

    Source: Hanley and McNeil, The Meaning and Use of the Area under a ROC Curve, 1982.
    """
    _, place, sizes = scores.unique(return_inverse=True, return_counts=True)
    ranks = (sizes.cumsum(0) - (sizes - 1) / 2)[place]  # equal scores share their mean rank
    positives = int(is_positive.sum())
    negatives = len(scores) - positives
    excess = float(ranks[is_positive].sum()) - positives * (positives + 1) / 2
    return excess / (positives * negatives)


def counts(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three counts for each class, float64 [C].

    These are the samples that are predicted correctly, are of the class, are predicted as it.
    """
    num_classes = probabilities.shape[1]
    predictions = probabilities.argmax(1)
    correct, support, predicted = (
        torch.bincount(classes, minlength=num_classes).double()
        for classes in (labels[labels == predictions], labels, predictions)
    )
    return correct, support, predicted
