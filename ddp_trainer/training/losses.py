"""The losses: each returns one value per sample, so that every loss is exact at any world size."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_trainer.config.losses import CrossEntropyConfig

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function of logits, float32 [B, C], and labels that returns the loss of each sample, [B].

The labels are int64 [B], or with mixup and CutMix float32 [B, C]: the probability of each class.
"""


def build_cross_entropy(config: CrossEntropyConfig, *, class_counts: Tensor | None) -> Loss:
    """Return torch's cross-entropy with label smoothing."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(
            logits, labels, reduction="none", label_smoothing=config.label_smoothing
        )

    return loss


def labeled(labels: Tensor) -> Tensor:
    """Return which samples have a label, bool [B]: a sample that could not be read has none.

    labels: int64 [B], negative for no label, or float [B, C], all zero for no label.
    """
    return labels >= 0 if labels.ndim == 1 else labels.sum(1) > 0
