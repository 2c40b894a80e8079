"""A loss of your own, the focal loss: python examples/own_loss.py

It also works on the command line, as a choice of the group loss:

    export PYTHONPATH=examples DDP_TRAINER_PLUGINS=own_loss
    NPROC=2 launch/local.sh loss=own_focal loss.gamma=1.5 model=lenet

A loss returns one value per sample. The step sums the values and divides the sum by the global
batch size, so that the loss is the same at any number of ranks.

Source: Lin et al., Focal Loss for Dense Object Detection, 2017 (arXiv 1708.02002).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_trainer import Config, LossConfig, launch, register_loss


@dataclass(kw_only=True, slots=True)
class FocalConfig(LossConfig):
    name: str = "own_focal"
    gamma: float = 2.0
    """Exponent: a larger value reduces the weight of samples that are classified well."""


@register_loss("own_focal", FocalConfig)
def build_focal(
    config: FocalConfig, *, class_counts: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss. class_counts: int64 [C], training samples per class; None if unknown."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        losses = cross_entropy(logits, labels, reduction="none")
        probability = (-losses).exp()
        return (1 - probability) ** config.gamma * losses

    return loss


if __name__ == "__main__":
    config = Config(
        model="lenet",
        loss={"name": "own_focal", "gamma": 1.5},
        epochs=4,
        global_batch_size=32,
        name="own_loss",
    )
    summary = launch(config, num_ranks=2)
    print(f"top-1 {summary.eval_top1:.4f} after {summary.steps} steps")
