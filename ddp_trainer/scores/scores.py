"""Scores of a model, computed from its predictions for all samples of a split."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ddp_trainer.training.evaluation import CONFIDENCE, ID, IN_TOP5, LABEL, LOSS, PREDICTION

NUM_BINS = 15
WORST = 100
"""The number of mistakes that are listed because their loss is the largest of all mistakes."""
WORST_PER_PAIR = 5
"""The number of mistakes with the largest loss that are listed for each frequent pair."""
NUM_PAIRS = 200
"""The number of pairs (true class, predicted class) that count as frequent."""


@dataclass(frozen=True)
class Scores:
    """The scores of a model. rows: float64 [N, 6], the result of `SampleResults.gather`."""

    rows: Tensor
    class_names: Sequence[str]

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.rows)

    @property
    def loss(self) -> float:
        """The mean cross-entropy over samples."""
        return float(self.rows[:, LOSS].mean())

    @property
    def top1(self) -> float:
        """The share of samples whose true class was predicted, in [0, 1]."""
        return float(self.is_correct.double().mean())

    @property
    def top5(self) -> float:
        """The share of samples, in [0, 1], whose true class was among the five most probable."""
        return float(self.rows[:, IN_TOP5].mean())

    @cached_property
    def is_correct(self) -> Tensor:
        """Whether the true class of each sample was predicted: bool [N]."""
        return self.rows[:, LABEL] == self.rows[:, PREDICTION]

    @cached_property
    def confusion(self) -> Tensor:
        """The number of samples, int64 [C, C], by true class (row) and predicted class (column)."""
        size = len(self.class_names)
        cells = (self.rows[:, LABEL] * size + self.rows[:, PREDICTION]).long()
        return torch.bincount(cells, minlength=size * size).view(size, size)

    def per_class(self) -> dict[str, dict[str, float | int | None]]:
        """Return precision, recall, F1 and support by class name; None where a divisor is zero."""
        correct = self.confusion.diagonal()
        support = self.confusion.sum(1)
        predicted = self.confusion.sum(0)
        counts = torch.stack([correct, support, predicted], 1).tolist()
        return {
            name: {
                "precision": right / given if given else None,
                "recall": right / own if own else None,
                "f1": 2 * right / (own + given) if own + given else None,
                "support": own,
            }
            for name, (right, own, given) in zip(self.class_names, counts, strict=True)
        }

    @cached_property
    def bins(self) -> Tensor:
        """The samples, their summed confidences, and the correct samples by bin: float64 [3, B].

        B is `NUM_BINS`; bin b has the samples whose confidence is in (b/B, (b+1)/B].
        """
        confidence = self.rows[:, CONFIDENCE]
        bins = (confidence.nan_to_num() * NUM_BINS).ceil().clamp(1, NUM_BINS).long() - 1
        weights = (torch.ones_like(confidence), confidence, self.is_correct.double())
        return torch.stack([torch.bincount(bins, one, minlength=NUM_BINS) for one in weights])

    def calibration(self) -> list[dict[str, float | int | None]]:
        """Return mean confidence, accuracy and count of each bin; an empty bin has None and 0."""
        return [
            {
                "confidence": confidence / n if n else None,
                "accuracy": correct / n if n else None,
                "count": int(n),
            }
            for n, confidence, correct in self.bins.T.tolist()
        ]

    def calibration_error(self) -> float:
        """Return the mean of |confidence - accuracy| over bins, weighted by their sample counts.

        Source: Guo et al., On Calibration of Modern Neural Networks, 2017 (arXiv 1706.04599).
        """
        _, confidence, correct = self.bins
        return float((confidence - correct).abs().sum()) / max(1, self.count)

    def mistakes(self) -> Tensor:
        """Return those `rows` that are the worst mistakes, the largest loss first: float64 [M, 6].

        These are the `WORST` mistakes with the largest loss, and for each of the `NUM_PAIRS` most
        frequent pairs (true class, predicted class) the `WORST_PER_PAIR` mistakes with the largest
        loss.
        """
        wrong = self.rows[~self.is_correct]
        wrong = wrong[wrong[:, LOSS].argsort(descending=True, stable=True)]
        pairs = [tuple(pair) for pair in wrong[:, [LABEL, PREDICTION]].tolist()]
        frequent = dict(Counter(pairs).most_common(NUM_PAIRS))
        taken: Counter[tuple[float, ...]] = Counter()
        kept = []
        for place, pair in enumerate(pairs):
            taken[pair] += 1
            if place < WORST or (pair in frequent and taken[pair] <= WORST_PER_PAIR):
                kept.append(place)
        return wrong[kept]

    def values(self) -> dict[str, Any]:
        """Return all scores by their names in metrics.json."""
        return {
            "loss": self.loss,
            "top1": self.top1,
            "top5": self.top5,
            "count": self.count,
            "calibration_error": self.calibration_error(),
            "calibration": self.calibration(),
            "per_class": self.per_class(),
        }


def ids_of(rows: Tensor) -> Tensor:
    """Return the sample ids, int64 [N], of `rows`, float64 [N, 6]."""
    return rows[:, ID].long()
