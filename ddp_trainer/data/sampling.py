"""How often an epoch draws each training sample: `data.sampling`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer.config.errors import require
from ddp_trainer.config.images import Sampling
from ddp_trainer.data.dataset import Split, per_sample

EXPONENTS = {Sampling.balanced: 1.0, Sampling.sqrt: 0.5}
"""A sample is drawn in proportion to the size of its class to the power of minus this."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The expected share of each sample in the draws of an epoch, and the samples by class."""

    weights: Tensor
    """float64 [N]: in proportion to the number of draws of each sample."""
    classes: Tensor
    """int64 [N]: the class of each sample. The number of draws of a class is exact to within 1."""

    def order(self, random: torch.Generator) -> Tensor:
        """Return the ids of N samples, int64 [N], in random order.

        A sample, or a class, that is expected k times is drawn floor(k) or ceil(k) times.

        Source: Baker, Reducing Bias and Inefficiency in the Selection Algorithm, 1987: stochastic
        universal sampling.
        """
        count = len(self.weights)
        samples = torch.randperm(count, generator=random)
        samples = samples[self.classes[samples].argsort(stable=True)]
        ends = self.weights[samples].cumsum(0)
        start = torch.rand((), generator=random, dtype=torch.float64)
        points = (torch.arange(count) + start) / count * ends[-1]
        places = torch.searchsorted(ends, points, right=True).clamp(max=count - 1)
        return samples[places][torch.randperm(count, generator=random)]


def build_draw(sampling: Sampling, split: Split, num_classes: int) -> Draw | None:
    """Return how an epoch draws the samples of `split`; None: each of them once.

    Raises:
        ConfigError: the split lacks the labels or the weights that `sampling` needs.
    """
    if sampling is Sampling.uniform:
        return None
    labels = per_sample(split, "labels")
    require(
        labels is not None,
        f"data.sampling={sampling.name} needs the labels of the training samples, and the data set"
        " has no attribute labels: add it (docs/api.md), or use data.sampling=uniform",
    )
    assert labels is not None
    if sampling is Sampling.weights:
        weights = per_sample(split, "weights")
        require(
            weights is not None and bool((weights >= 0).all()) and float(weights.sum()) > 0,
            "data.sampling=weights needs a weight of 0 or more for each training sample, and not"
            " only 0: add a column weight to the table of data=manifest, or a member weights to the"
            " data set",
        )
        assert weights is not None
        return Draw(weights.double() / float(weights.max()), labels)
    sizes = torch.bincount(labels, minlength=num_classes).double()
    return Draw(sizes[labels] ** -EXPONENTS[sampling], labels)
