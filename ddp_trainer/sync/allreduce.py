"""All-reduce the gradients after backward: the simplest correct strategy.

This strategy shows what DDP improves. Here, communication does not overlap with backward, so a step
waits for the whole communication. If each gradient is sent in a separate message, each message adds
the latency of the network. If all gradients are copied into one flat bucket, the latency is added
only once, but the copy takes time.

Source: Dive into Deep Learning, "Training on Multiple GPUs": ``allreduce(data)``, here between
processes.
"""

from ddp_trainer.config.sync import Bucket
from ddp_trainer.sync.base import GradientSync, flatten, unflatten


class AllReduceSync(GradientSync):
    """Averages gradients over ranks by all-reduce calls after backward."""

    def before_step(self) -> None:
        gradients = self.gradients()
        if self.config.bucket is Bucket.parameter:
            for gradient in gradients:
                self.world.all_reduce(gradient).div_(self.world.world_size)
        else:
            mean = self.world.all_reduce(flatten(gradients)).div_(self.world.world_size)
            unflatten(mean, gradients)
