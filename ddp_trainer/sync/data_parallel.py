"""torch's ``nn.DataParallel``: one process, many GPUs, a fresh copy of the model at every forward.

This strategy shows why torch's documentation recommends DDP: the parameters are broadcast in each
step, one interpreter drives all GPUs, and the first GPU gathers all logits and gradients.

Source: Dive into Deep Learning, "Concise Implementation for Multiple GPUs".
"""

import torch
from torch import nn

from ddp_trainer.config.errors import require
from ddp_trainer.config.sync import DataParallelConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import GradientSync


class DataParallelSync(GradientSync):
    """Uses ``nn.DataParallel``, which accumulates the gradients in the original model."""

    def __init__(self, config: DataParallelConfig, world: World) -> None:
        """Raises ConfigError if the run trains on a CPU."""
        super().__init__(config, world)
        require(
            world.device.type == "cuda",
            "sync=data_parallel is for one process with GPUs, and this process trains on the CPU:"
            " use torchrun --nproc_per_node=N -m ddp_trainer sync=ddp, or sync=replicas in one"
            " process",
        )

    @property
    def num_devices(self) -> int:
        return torch.cuda.device_count()

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model, device_ids=list(range(self.num_devices)))
