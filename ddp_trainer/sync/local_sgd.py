"""Local SGD: each rank takes its own optimizer steps, and parameters are averaged every H steps.

This strategy shows that communication can be less frequent instead of cheaper. With H = 1 and an
optimizer that is linear in the gradient (SGD, momentum), this is ordinary data parallelism. With
a larger H, the parameters of ranks differ between two averages. The state of the optimizer is
averaged too, so that all ranks are equal after an average.

Source: Stich, Local SGD Converges Fast and Communicates Little, 2019 (arXiv 1805.09767); Yu, Jin
and Yang, On the Linear Speedup Analysis of Communication Efficient Momentum SGD, 2019 (arXiv
1905.03817).
"""

import torch
from torch.optim import Optimizer

from ddp_trainer.sync.base import GradientSync, flatten, unflatten


class LocalSGDSync(GradientSync):
    """Averages trained parameters and optimizer state every `every_steps` steps.

    They are also averaged when an epoch or a launch ends.
    """

    steps_apart = 0

    @property
    def is_synchronized(self) -> bool:
        return self.steps_apart == 0

    def after_step(self, optimizer: Optimizer) -> None:
        self.steps_apart += 1
        if self.steps_apart == self.config.every_steps:
            self.synchronize(optimizer)

    def synchronize(self, optimizer: Optimizer) -> None:
        if self.world.world_size > 1 and not self.is_synchronized:
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            state = [
                v
                for p in parameters
                for v in optimizer.state.get(p, {}).values()
                if torch.is_tensor(v)
            ]
            tensors = [*(p.detach() for p in parameters), *state]
            unflatten(self.world.all_reduce(flatten(tensors)).div_(self.world.world_size), tensors)
        self.steps_apart = 0
