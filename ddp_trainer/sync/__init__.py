"""How replicas agree: one file a strategy, all behind `GradientSync`."""

from __future__ import annotations

from typing import assert_never

import torch

from ddp_trainer.config import (
    SCHEMAS,
    AllReduceConfig,
    ConfigError,
    DataParallelConfig,
    DDPConfig,
    LocalSGDConfig,
    NoSyncConfig,
    ParameterServerConfig,
    ReplicasConfig,
    RingConfig,
    SyncConfig,
    require,
)
from ddp_trainer.distributed import World
from ddp_trainer.sync.allreduce import AllReduceSync
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.buffers import averaged_statistics, flatten_buffers, restore_buffers
from ddp_trainer.sync.data_parallel import DataParallelSync
from ddp_trainer.sync.ddp import DDPSync
from ddp_trainer.sync.local_sgd import LocalSGDSync
from ddp_trainer.sync.parameter_server import ParameterServerSync
from ddp_trainer.sync.replicas import ReplicasSync
from ddp_trainer.sync.ring import RingSync

__all__ = ["GradientSync", "averaged_statistics", "build_sync", "flatten_buffers", "restore_buffers"]


def build_sync(config: SyncConfig, world: World) -> GradientSync:
    """Return the strategy that `config` names.

    Raises:
        ConfigError: it cannot serve this world.
    """
    match config:
        case NoSyncConfig():
            return GradientSync()
        case DDPConfig():
            return DDPSync(config, world)
        case AllReduceConfig():
            return AllReduceSync(config, world)
        case RingConfig():
            check_point_to_point(config, world)
            return RingSync(world)
        case ParameterServerConfig():
            check_point_to_point(config, world)
            return ParameterServerSync(config, world)
        case LocalSGDConfig():
            return LocalSGDSync(config, world)
        case ReplicasConfig():
            return ReplicasSync(replica_devices(config, world))
        case DataParallelConfig():
            return DataParallelSync(world)
        case SyncConfig():
            raise ConfigError(f"sync.name={config.name!r} is unknown: choose one of {', '.join(SCHEMAS['sync'])}")
        case _:
            assert_never(config)


def check_point_to_point(config: SyncConfig, world: World) -> None:
    """Refuse GPU tensors over gloo, which cannot send them from one rank to another.

    Raises:
        ConfigError: says so.
    """
    require(
        world.device.type == "cpu" or world.backend != "gloo",
        f"sync={config.name} sends between single ranks, which backend=gloo cannot do for GPUs: "
        "use backend=nccl, device=cpu, or sync=ddp",
    )


def replica_devices(config: ReplicasConfig, world: World) -> list[torch.device]:
    """Return the devices of the replicas, the first of which holds the model.

    Raises:
        ConfigError: one of them is not here, or the first is not what the run trains on.
    """
    devices = [torch.device(name) for name in config.devices]
    gpus = torch.cuda.device_count()
    for device in devices:
        require(
            device.type == "cpu" or (device.index is not None and device.index < gpus),
            f"sync.devices={config.devices}: {device} is not one of the {gpus} GPUs here",
        )
    require(
        devices[0] == world.device,
        f"sync.devices={config.devices} must begin with the device that the run trains on, {world.device}: "
        f"set device={'cpu' if devices[0].type == 'cpu' else 'cuda'}, or change the list",
    )
    return devices
