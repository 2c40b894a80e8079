"""Average gradients on rank 0: reduce to it, divide, broadcast."""

import torch.distributed as dist

from ddp_trainer import GradientSync


class ReduceBroadcastSync(GradientSync):
    def before_step(self) -> None:
        for gradient in self.gradients():
            dist.reduce(gradient, dst=0)
            gradient /= self.world.world_size
            dist.broadcast(gradient, src=0)
