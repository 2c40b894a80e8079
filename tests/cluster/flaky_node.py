"""A plug-in that makes the ranks of one SLURM node, FLAKY_NODE, compute wrong gradients from step 5
on.
"""

import os

from torch import Tensor, nn

from ddp_trainer.training.step import TrainStep

take_step = TrainStep.__call__


def flaky_step(self: TrainStep, images: Tensor, labels: Tensor) -> Tensor:
    if self.count == 5:
        weight = next(
            module.weight for module in self.model.modules() if isinstance(module, nn.Linear)
        )
        weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
    return take_step(self, images, labels)


if os.environ.get("SLURMD_NODENAME") == os.environ["FLAKY_NODE"]:
    TrainStep.__call__ = flaky_step
