"""Finds images whose label is probably wrong, by the predictions of models not trained on them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddp_trainer.config.errors import require
from ddp_trainer.data.dataset import Split, num_samples, sample_name
from ddp_trainer.distributed.environment import Environment
from ddp_trainer.distributed.process_group import process_group
from ddp_trainer.tools.scoring import evaluate_split
from ddp_trainer.tools.splits import choose_split
from ddp_trainer.tools.trained_model import load_model
from ddp_trainer.training.evaluation import ID


@dataclass(frozen=True, slots=True)
class Suspect:
    """An image whose label is probably wrong, and the class that a model takes it for."""

    path: str
    label: str
    suggested: str
    probability: float
    """The probability of the suggested class."""


def suspected_labels(
    run_dirs: Sequence[Path],
    class_names: list[str],
    splits: Sequence[Split],
    environment: Environment,
) -> list[Suspect]:
    """Return the suspects among the images on which the runs were evaluated, the clearest first.

    Together, the runs of a cross-validation have evaluated all images of the training split.

    Raises:
        ConfigError: a run cannot be used, it has other classes than `class_names` or other images
        than `splits`, or two runs have evaluated the same image.
    """
    images = {
        os.path.abspath(sample_name(split, index))
        for split in splits
        for index in range(num_samples(split))
    }
    seen: dict[str, Path] = {}
    paths: list[str] = []
    parts = []
    for run_dir in run_dirs:
        trained = load_model(run_dir)
        require(
            class_names == trained.class_names,
            f"{run_dir} was trained on other classes than those of this data set: give runs of it",
        )
        split = choose_split(trained).images
        own = [os.path.abspath(sample_name(split, index)) for index in range(num_samples(split))]
        for path in own:  # before the evaluation, which takes long
            require(
                path in images,
                f"{run_dir} was evaluated on {path}, which this data set lacks: give runs of it",
            )
            require(
                path not in seen,
                f"{run_dir} and {seen.get(path)} were evaluated on the same images: give one run"
                " for each data.fold",
            )
            seen[path] = run_dir
        with process_group(environment, **trained.config.process_group) as world:
            results, _ = evaluate_split(trained, split, world, bad=[], keeps_probabilities=True)
            ids = results.gather(world)[:, ID].long()
            parts.append(results.gather_probabilities(world))
        paths += [sample_name(split, index) for index in ids.tolist()]
    probabilities, labels = (torch.cat(values) for values in zip(*parts, strict=True))
    return [
        Suspect(
            path=paths[place],
            label=class_names[labels[place]],
            suggested=class_names[suggested],
            probability=float(probabilities[place, suggested]),
        )
        for place, suggested in improbable_labels(probabilities, labels)
    ]


def improbable_labels(probabilities: Tensor, labels: Tensor) -> list[tuple[int, int]]:
    """Return the suspects, as pairs of a sample and its most probable class, the clearest first.

    A sample is suspected if its label is less probable for it than this class is for the samples
    with other labels, on average.

    probabilities: float32 [N, C], of models that were not trained on the sample. labels: int64 [N].

    Source: Northcutt, Jiang and Chuang, Confident Learning: Estimating Uncertainty in Dataset
    Labels, 2021, has similar thresholds, and orders the suspects by the same margin. Its rule asks
    whether another class is probable: docs/your-images.md compares both rules.
    """
    of_others = torch.ones_like(probabilities).scatter_(1, labels[:, None], 0)
    thresholds = (probabilities * of_others).sum(0) / of_others.sum(0)  # NaN without others: never
    own = probabilities.gather(1, labels[:, None])[:, 0]
    best, suggested = probabilities.max(1)
    chosen = ((own < thresholds[labels]) & (suggested != labels)).nonzero()[:, 0]
    chosen = chosen[(own - best)[chosen].argsort()]
    return [(place, int(suggested[place])) for place in chosen.tolist()]
