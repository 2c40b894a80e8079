"""The labels of a data set, where it has them without reading its images."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset


def labels_of(split: Any) -> Tensor | None:
    """Return the labels of a split, int64 [N] on the CPU; None if it has no tensor ``labels``."""
    if isinstance(split, Subset):
        labels = labels_of(split.dataset)
        return None if labels is None else labels[list(split.indices)]
    labels = getattr(split, "labels", None)
    return labels.cpu() if isinstance(labels, Tensor) else None


def class_counts(split: Any, num_classes: int) -> Tensor | None:
    """Return the number of samples of each class, int64 [num_classes]; None if it is unknown."""
    labels = labels_of(split)
    return None if labels is None else torch.bincount(labels, minlength=num_classes)
