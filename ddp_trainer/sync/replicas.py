"""Data parallelism in one process, from scratch: a replica and a part of the batch on each device.

This strategy shows the steps of every other strategy. The parameters are copied, the batch is
split, each replica computes its gradients, and the gradients are added up. Then the first replica
is updated and copied to the others. One process drives all devices, so the Python interpreter is
shared, and the first device holds all logits; these are the reasons to use DDP instead.

Source: Dive into Deep Learning, "Training on Multiple GPUs": ``get_params``, ``split_batch``,
``allreduce``.
"""

import copy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_trainer.config.errors import require
from ddp_trainer.config.sync import ReplicasConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import GradientSync


def get_params(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the whole `model` on `device`; the copy and `model` share no tensor."""
    return copy.deepcopy(model).to(device)


def split_batch(images: Tensor, devices: list[torch.device]) -> list[Tensor]:
    """Split `images`, [B, …], into one part for each device; return the parts on `devices`.

    The sizes differ by at most one. No part is empty: for B < len(devices), there are B parts.
    """
    parts = images.tensor_split(min(len(devices), len(images)))
    return [
        part.to(device, non_blocking=True) for part, device in zip(parts, devices, strict=False)
    ]


def allreduce(tensors: list[Tensor]) -> None:
    """Set each of `tensors`, of one shape, to their sum; they may be on different devices."""
    first, *others = tensors
    for other in others:
        first += other.to(first.device, non_blocking=True)
    for other in others:
        other.copy_(first, non_blocking=True)


class Replicas(nn.Module):
    """Calls each replica with one part of the batch, on the device of the replica."""

    def __init__(self, model: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.replicas = nn.ModuleList(
            [model, *(get_params(model, device) for device in devices[1:])]
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of `images`, [B, classes], on the first device."""
        parts = split_batch(images, self.devices)
        logits = [replica(part) for replica, part in zip(self.replicas, parts, strict=False)]
        return torch.cat([part.to(self.devices[0], non_blocking=True) for part in logits])


class ReplicasSync(GradientSync):
    """Adds up the gradients of this process's replicas, and copies the updated parameters."""

    def __init__(self, config: ReplicasConfig, world: World) -> None:
        """Check the devices of the config.

        Raises:
            ConfigError: a device does not exist, or the first is not the device of the run.
        """
        super().__init__(config, world)
        self.devices = [torch.device(name) for name in config.devices]
        gpus = torch.cuda.device_count()
        for device in self.devices:
            require(
                device.type == "cpu" or device.index < gpus,
                f"sync.devices={config.devices}: {device} is not one of the {gpus} GPUs of this"
                " host",
            )
        require(
            self.devices[0] == world.device,
            f"sync.devices={config.devices} must begin with the device that the run trains on,"
            f" {world.device}: change the list, or device",
        )

    @property
    def num_devices(self) -> int:
        return len(set(self.devices))

    def wrap(self, model: nn.Module) -> nn.Module:
        module = Replicas(model, self.devices)
        self.replicas = list(module.replicas)
        return module

    def before_step(self) -> None:
        for parameters in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            # a replica without samples and a frozen parameter have no gradient
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                allreduce(gradients)

    def begin(self) -> None:
        self.copy_parameters()

    def after_step(self, optimizer: Optimizer) -> None:
        for other in self.replicas[1:]:
            other.zero_grad()
        self.copy_parameters()

    @torch.no_grad()
    def copy_parameters(self) -> None:
        """Copy the parameters of the first replica, which the optimizer updates, to the others."""
        first, *others = self.replicas
        for other in others:
            for parameter, new in zip(other.parameters(), first.parameters(), strict=True):
                parameter.copy_(new, non_blocking=True)
