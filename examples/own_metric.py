"""A metric of your own, balanced accuracy: python examples/own_metric.py

On the command line it is a choice of the group metric, which is a list:

    export PYTHONPATH=examples DDP_TRAINER_PLUGINS=own_metric
    NPROC=2 launch/local.sh metric=[own_balanced] model=lenet

A metric is computed on rank 0 from the results of all ranks, each sample once. Its value is logged
as eval/own_balanced.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer import Config, MetricConfig, launch, register_metric


@dataclass(kw_only=True, slots=True)
class BalancedConfig(MetricConfig):
    name: str = "own_balanced"


@register_metric("own_balanced", BalancedConfig)
def build_balanced(config: BalancedConfig) -> Callable[[Tensor, Tensor], float]:
    """Return a function of probabilities, float32 [N, C], and labels, int64 [N]."""

    def balanced_accuracy(probabilities: Tensor, labels: Tensor) -> float:
        is_correct = probabilities.argmax(1) == labels
        recalls = [is_correct[labels == label].double().mean() for label in labels.unique()]
        return float(torch.stack(recalls).mean())

    return balanced_accuracy


if __name__ == "__main__":
    config = Config(
        model="lenet",
        metric=["own_balanced"],
        epochs=4,
        global_batch_size=32,
        name="own_metric",
    )
    summary = launch(config, num_ranks=2)
    print(f"top-1 {summary.eval_top1:.4f} after {summary.steps} steps")
