"""torch's DistributedDataParallel: gradients travel in buckets while backward still runs.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020
(arXiv 2006.15704).
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.config import DDPConfig
from ddp_trainer.distributed import World
from ddp_trainer.sync.base import GradientSync

# torch 2.14 renamed the flag and warns about the old name; 2.11 knows only that.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DDPSync(GradientSync):
    """Let DDP average the gradients during backward.

    BatchNorm statistics stay local here; `averaged_statistics` reconciles them where they matter.
    """

    def __init__(self, config: DDPConfig, world: World) -> None:
        self.config, self.world = config, world
        self.replica: DistributedDataParallel | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        self.replica = DistributedDataParallel(
            model,
            device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None,
            bucket_cap_mb=self.config.bucket_cap_mb,
            gradient_as_bucket_view=True,
            **options,
        )
        return self.replica

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.replica is None else self.replica.no_sync()
