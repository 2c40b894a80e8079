"""Holds out a part of the training images for evaluation: a fraction, or one of several folds."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from ddp_trainer.config.errors import require
from ddp_trainer.config.images import DataConfig
from ddp_trainer.data.dataset import Datasets, ImageTensors, Split, num_samples, per_sample
from ddp_trainer.distributed.seeding import generator


def hold_out(datasets: Datasets, config: DataConfig) -> Datasets:
    """Return `Datasets` whose evaluation split is held out from the training split.

    The held-out samples are random, but the same for every seed of a run:

    - of a split with ``groups``: whole groups, with about the same share of each class; with
      data.validation_fraction, together at most this fraction of the samples;
    - of a split with ``labels``: the same share of each class, to within one sample. With
      data.validation_fraction, never a whole class; but of images in memory, any samples;
    - of any other split: any samples.

    Raises:
        ConfigError: no sample would be held out, or there are fewer samples or groups than folds.
    """
    split = datasets.train
    mask = choose_fold(split, config) if config.fold is not None else choose_fraction(split, config)
    return Datasets(
        train=select(split, (~mask).nonzero()[:, 0]),
        eval=select(split, mask.nonzero()[:, 0]),
        class_names=datasets.class_names,
        eval_split="validation",
    )


def choose_fold(split: Split, config: DataConfig) -> Tensor:
    """Return a mask of the samples in the fold data.fold, bool [N]."""
    count = num_samples(split)
    num_folds = config.num_folds
    labels = labels_of(split)
    groups = per_sample(split, "groups")
    parts = count if groups is None else len(groups.unique())
    require(
        parts >= num_folds,
        f"data.num_folds={num_folds} must be at most the number of"
        f" {'training images' if groups is None else 'groups of the training images'}, {parts}",
    )
    if groups is None:
        return deal(labels, num_folds) == config.fold
    mask = distribute_groups(groups, labels, [1 / num_folds] * num_folds) == config.fold
    require(
        bool(mask.any()),
        f"data.fold={config.fold} of data.num_folds={num_folds} has no group, because others are"
        " large: set fewer folds",
    )
    return mask


def labels_of(split: Split) -> Tensor:
    """Return the label of each sample, int64 [N]; 0 for all of them if they are unknown."""
    labels = per_sample(split, "labels")
    return torch.zeros(num_samples(split), dtype=torch.long) if labels is None else labels.cpu()


def deal(labels: Tensor, num_folds: int) -> Tensor:
    """Return a random fold for each sample, int64 [N]; each has the same share of each class."""
    order = torch.randperm(len(labels), generator=generator(0, purpose="folds"))
    order = order[labels[order].argsort(stable=True)]
    folds = torch.empty_like(order)
    folds[order] = torch.arange(len(order)) % num_folds
    return folds


def choose_fraction(split: Split, config: DataConfig) -> Tensor:
    """Return a mask of data.validation_fraction of the samples, bool [N]."""
    fraction = config.validation_fraction
    count = num_samples(split)
    groups = per_sample(split, "groups")
    labels = labels_of(split)
    if isinstance(split, ImageTensors):
        labels = torch.zeros_like(labels)
    if groups is None:
        mask = choose_samples(labels, fraction)
    else:
        require(
            len(groups.unique()) > 1,
            f"data.validation_fraction={fraction} needs two or more groups, and all {count}"
            " training images are in one: correct the groups (of a table: data.group_column), or"
            " remove them (data.group_column=null)",
        )
        shares = [1 - fraction, fraction]
        mask = distribute_groups(groups, labels, shares, most=math.floor(fraction * count)) == 1
    require(
        bool(mask.any()),
        f"data.validation_fraction={fraction} of {count} training images holds out no image: raise"
        " data.validation_fraction, or, if every class has a single image, add images",
    )
    return mask


def distribute_groups(
    groups: Tensor, labels: Tensor, shares: list[float], *, most: int | None = None
) -> Tensor:
    """Return the number of the part to which each sample belongs, int64 [N]: groups stay whole.

    groups: the group of each sample, [N]. labels: int64 [N]. shares: the share of each class that
    each part should have, with the sum 1. most: the largest size of the last part; None: any.

    The groups with the most uneven classes come first. Each goes to the part where it brings the
    numbers of samples of all classes, and of all samples, nearest to their shares, by Pearson's
    chi-squared statistic.

    Source: scikit-learn, StratifiedGroupKFold, which compares standard deviations instead.
    """
    _, numbers = groups.unique(return_inverse=True)
    num_groups = int(numbers.max()) + 1
    num_classes = int(labels.max()) + 1
    sizes = torch.bincount(numbers * num_classes + labels, minlength=num_groups * num_classes)
    by_class = sizes.view(num_groups, num_classes).double().numpy()
    by_group = np.column_stack([by_class, by_class.sum(1)])
    target = np.outer(shares, by_group.sum(0))
    weight = 1 / np.maximum(target, 1e-9)
    missing = target.copy()
    free = len(labels) if most is None else most
    parts = np.zeros(num_groups, np.int64)
    order = torch.randperm(num_groups, generator=generator(0, purpose="validation")).numpy()
    for group in order[np.argsort(-by_class.std(1)[order], kind="stable")]:
        counts = by_group[group]
        change = ((counts - 2 * missing) * counts * weight).sum(1)
        if counts[-1] > free:
            change[-1] = math.inf
        part = int(change.argmin())
        parts[group] = part
        missing[part] -= counts
        if part == len(shares) - 1:
            free -= counts[-1]
    return torch.from_numpy(parts)[numbers]


def choose_samples(labels: Tensor, fraction: float) -> Tensor:
    """Return a mask, bool [N], that selects a random `fraction` of each class.

    labels: the class of each sample, [N]. The number of selected samples of a class is rounded up
    or down, such that their sum is `fraction` of all samples. At least one sample of each class is
    not selected.
    """
    order = torch.randperm(len(labels), generator=generator(0, purpose="validation"))
    mask = torch.zeros(len(labels), dtype=torch.bool)
    total = 0
    for label in labels.unique():
        samples = order[labels[order] == label]
        size = len(samples)
        total += size
        missing = round(fraction * total) - int(mask.sum())
        highest = min(missing, math.ceil(fraction * size), size - 1)
        mask[samples[: max(math.floor(fraction * size), highest)]] = True
    return mask


def select(split: Split, ids: Tensor) -> Split:
    """Return the part of `split` with the samples `ids`, int64 [N]."""
    if isinstance(split, ImageTensors):
        return ImageTensors(split.images[ids], split.labels[ids], split.center_crop, ids)
    return Subset(split, ids.tolist())
