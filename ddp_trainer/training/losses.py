"""The losses: each returns one value per sample, so that every loss is exact at any world size."""

from collections.abc import Callable

import torch
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


def sum_of_losses(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum [] of the losses of a batch; samples without a label do not count.

    logits: float32 [B, C]. labels: int64 [B], negative for a sample that could not be read, which
    `loss` need not know; or float [B, C], all zero for such a sample.
    """
    is_known = labels >= 0 if labels.ndim == 1 else labels.sum(1) > 0
    losses = loss(logits, labels.clamp(min=0))
    return torch.where(is_known, losses, 0).sum()
