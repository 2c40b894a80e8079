"""The losses. Each returns one value per sample, so that the mean is exact at any world size."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.config.losses import BCEConfig, CrossEntropyConfig, FocalConfig
from ddp_trainer.optim.interfaces import Loss


def build_cross_entropy(config: CrossEntropyConfig, *, class_counts: Tensor | None) -> Loss:
    """Return torch's cross-entropy with label smoothing. class_counts: not used."""
    return partial(cross_entropy, reduction="none", label_smoothing=config.label_smoothing)


def build_focal(config: FocalConfig, *, class_counts: Tensor | None) -> Loss:
    """Return the focal loss: the cross-entropy times (1 - p)^gamma, p: probability of the class.

    Source: Lin et al., Focal Loss for Dense Object Detection, 2017 (arXiv 1708.02002).
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_p = logits.log_softmax(1)
        losses = (1 - log_p.exp()) ** config.gamma * -log_p
        return (targets(labels, logits) * losses).sum(1)

    return loss


def build_bce(config: BCEConfig, *, class_counts: Tensor | None) -> Loss:
    """Return the mean over the classes of the binary cross-entropy of each class against the rest.

    Source: Wightman, Touvron and Jégou, ResNet Strikes Back, 2021 (arXiv 2110.00476).
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        expected = targets(labels, logits)
        return binary_cross_entropy_with_logits(logits, expected, reduction="none").mean(1)

    return loss


def targets(labels: Tensor, logits: Tensor) -> Tensor:
    """Return the probability of each class, [B, C], as `logits`; labels: see `Loss`."""
    if labels.ndim == 2:
        return labels.to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, labels[:, None], 1.0)


def weigh(loss: Loss, weights: Tensor) -> Loss:
    """Return `loss` times the weight of the class of each sample.

    weights: float32 [C]. A mixed sample gets the mean of the weights of its classes.
    """

    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        factor = weights[labels] if labels.ndim == 1 else labels @ weights
        return loss(logits, labels) * factor

    return weighted


def class_weights(
    chosen: str | Mapping[str, float], counts: Tensor | None, class_names: Sequence[str]
) -> Tensor | None:
    """Return the weight of each class, float32 [C], whose mean over the samples is 1.

    chosen: `LossConfig.class_weights`; None is returned for "none". counts: int64 [C], the number
    of training samples of each class; None: unknown.

    Raises:
        ConfigError: there is no such class, `counts` is None, or no sample has a weight above 0.
    """
    if chosen == "none":
        return None
    if counts is None:
        raise ConfigError(
            f"loss.class_weights={chosen} needs the size of each class, and the data set has no"
            " attribute labels: add it (docs/api.md), or use loss.class_weights=none"
        )
    sizes = counts.double()
    if isinstance(chosen, str):
        weights = sizes.reciprocal().where(sizes > 0, 0.0)
    else:
        for name in chosen:
            require(
                name in class_names,
                f"loss.class_weights has the class {name!r}, and the classes are"
                f" {', '.join(class_names)[:200]}",
            )
        weights = torch.tensor([float(chosen.get(name, 1)) for name in class_names]).double()
    total = weights @ sizes
    require(bool(total > 0), f"loss.class_weights={chosen} leaves no sample with a weight above 0")
    require(bool(total.isfinite()), f"loss.class_weights={chosen} must have a finite sum")
    return (weights * sizes.sum() / total).float()
