"""torch's DistributedDataParallel: all-reduces gradients in buckets while backward still runs.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020
(arXiv 2006.15704).
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.config.errors import require
from ddp_trainer.config.sync import CommHook, DDPConfig
from ddp_trainer.distributed.world import World, set_waiting, waiting
from ddp_trainer.sync.base import GradientSync

# torch 2.14 renamed the flag and warns about the old name; 2.11 has only the old name.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DDPSync(GradientSync):
    """Lets DDP average the gradients during backward.

    Each rank keeps its own BatchNorm statistics; `averaged_statistics` averages them where a model
    is evaluated or saved.
    """

    def __init__(self, config: DDPConfig, world: World) -> None:
        """Raises ConfigError for PowerSGD on the CPU if torch sees a GPU: the hook then fails."""
        require(
            config.comm_hook is not CommHook.powersgd
            or world.device.type == "cuda"
            or not torch.cuda.is_available(),
            "sync.comm_hook=powersgd with device=cpu fails where torch sees a GPU: set"
            " CUDA_VISIBLE_DEVICES= (empty)",
        )
        super().__init__(config, world)
        self.replica: DistributedDataParallel | None = None

    @waiting()
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a DDP module with the hook of the config; with one rank and no hook, `model`.

        Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019 (arXiv 1905.13727).
        """
        self.model = model
        if self.world.world_size == 1 and self.config.comm_hook is CommHook.none:
            return model  # there is nothing to average, and a CUDA graph can capture the step
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        self.replica = replica = DistributedDataParallel(
            model,
            process_group=self.world.group,
            device_ids=[self.world.device.index] if self.world.device.type == "cuda" else None,
            bucket_cap_mb=self.config.cap_mb(4.0 * sum(p.numel() for p in model.parameters())),
            gradient_as_bucket_view=True,
            **options,
        )
        match self.config.comm_hook:
            case CommHook.fp16:
                replica.register_comm_hook(self.world.group, default_hooks.fp16_compress_hook)
            case CommHook.bf16:
                replica.register_comm_hook(self.world.group, default_hooks.bf16_compress_hook)
            case CommHook.powersgd:
                state = powerSGD_hook.PowerSGDState(
                    process_group=self.world.group,
                    matrix_approximation_rank=self.config.powersgd_rank,
                    start_powerSGD_iter=self.config.powersgd_warmup_steps,
                )
                replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        mark_wait_in_backward(model)
        return replica

    def no_sync(self) -> AbstractContextManager[None]:
        return super().no_sync() if self.replica is None else self.replica.no_sync()


def mark_wait_in_backward(model: nn.Module) -> None:
    """Install a hook that marks this rank as waiting while DDP waits at the end of backward.

    DDP waits in C++, in a callback that autograd calls after the last gradient. Autograd calls such
    callbacks in the order in which they were queued. The hook on a gradient queues `begin` before
    DDP queues its own callback, because DDP does this after all gradients are ready. `begin` queues
    a second callback, which therefore runs after DDP's callback.
    """
    queue_callback = Variable._execution_engine.queue_callback  # torch has no public name for it

    def begin() -> None:
        set_waiting(True)
        queue_callback(lambda: set_waiting(False))

    def gradient_ready(_parameter: Tensor) -> None:
        queue_callback(begin)

    trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    trained.register_post_accumulate_grad_hook(gradient_ready)
