"""All-reduce the gradients after backward: the simplest correct strategy.

Teaches what DDP does for you: nothing overlaps here, so a step waits for all of its communication. One message per
parameter pays the network's latency for each of them; one flat bucket pays it once, plus the time of a copy.

Source: Dive into Deep Learning, "Training on Multiple GPUs": ``allreduce(data)``, over processes in place of devices.
"""

from ddp_trainer.config.sync import Bucket
from ddp_trainer.sync.base import GradientSync, flatten, unflatten


class AllReduceSync(GradientSync):
    """Average gradients by collective calls of the process group."""

    def before_step(self) -> None:
        if self.world.world_size == 1:
            return
        gradients = self.gradients()
        if self.config.bucket is Bucket.parameter:
            for gradient in gradients:
                self.world.all_reduce(gradient).div_(self.world.world_size)
            return
        flat = flatten(gradients)
        unflatten(self.world.all_reduce(flat).div_(self.world.world_size), gradients)
