"""Average gradients on rank 0: reduce to it, divide, broadcast."""

import torch.distributed as dist
from torch import nn

from ddp_trainer import GradientSync, World
from example_plugin import ReduceBroadcastConfig


class ReduceBroadcastSync(GradientSync):
    def __init__(self, config: ReduceBroadcastConfig, world: World) -> None:
        self.world = world
        self.parameters: list[nn.Parameter] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        self.parameters = list(model.parameters())
        return model

    def before_step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                dist.reduce(parameter.grad, dst=0)
                parameter.grad /= self.world.world_size
                dist.broadcast(parameter.grad, src=0)
