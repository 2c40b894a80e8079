"""The loss of a batch in which some samples may have no label."""

import torch
from torch import Tensor

from ddp_trainer.config.errors import require
from ddp_trainer.optim.interfaces import Loss


def sum_of_losses(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum [] of the losses of a batch; samples without a label do not count.

    logits: float32 [B, C]. labels: int64 [B], negative for a sample without a label; or float32
    [B, C], all zero for such a sample. `loss` gets 0 in place of a negative label.
    Raises ConfigError if `loss` returns another shape than [B], which would be broadcast.
    """
    is_known = labels >= 0 if labels.ndim == 1 else labels.sum(1) > 0
    losses = loss(logits, labels.clamp(min=0))
    require(
        losses.shape == is_known.shape,
        f"the loss must return one value per sample, {list(is_known.shape)}, and returns"
        f" {list(losses.shape)}",
    )
    return torch.where(is_known, losses, 0).sum()
