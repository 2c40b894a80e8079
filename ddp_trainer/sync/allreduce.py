"""All-reduce the gradients after backward: the simplest correct strategy.

Teaches what DDP does for you: nothing overlaps here, so all of the communication is waited for. A parameter at a
time pays the network's latency for each; one flat bucket pays it once, and a copy.

Source: Dive into Deep Learning, "Training on Multiple GPUs": ``allreduce(data)``, over processes in place of devices.
"""

import torch.distributed as dist
from torch import Tensor, nn

from ddp_trainer.config.sync import AllReduceConfig, Bucket
from ddp_trainer.distributed.process_group import World
from ddp_trainer.sync.base import GradientSync, flatten, unflatten


class AllReduceSync(GradientSync):
    """Average gradients by collective calls of the process group."""

    def __init__(self, config: AllReduceConfig, world: World) -> None:
        self.config, self.world = config, world
        self.parameters: list[nn.Parameter] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        self.parameters = list(model.parameters())
        return model

    def before_step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.world.world_size == 1:
            return
        if self.config.bucket is Bucket.parameter:
            for gradient in gradients:
                self.average(gradient)
            return
        flat = flatten(gradients)
        self.average(flat)
        unflatten(flat, gradients)

    def average(self, tensor: Tensor) -> None:
        """Replace `tensor` by its mean over ranks."""
        dist.all_reduce(tensor)
        tensor /= self.world.world_size
