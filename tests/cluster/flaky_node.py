"""A plug-in that makes the ranks of one SLURM node, FLAKY_NODE, compute wrong gradients from step 5
on.
"""

import os
from typing import Any


def make_flaky() -> None:
    # here, because they import torch, which most processes of a job do not need
    from torch import nn

    from ddp_trainer.training.step import TrainStep

    take_step = TrainStep.__call__

    def flaky_step(self: TrainStep, *batch: Any) -> Any:
        if self.count == 5:
            weight = next(
                module.weight for module in self.model.modules() if isinstance(module, nn.Linear)
            )
            weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
        return take_step(self, *batch)

    TrainStep.__call__ = flaky_step  # type: ignore[method-assign]


if os.environ.get("SLURMD_NODENAME") == os.environ["FLAKY_NODE"]:
    make_flaky()
