"""How replicas agree: one file a strategy, all behind `GradientSync`."""

from __future__ import annotations

from typing import assert_never

from ddp_trainer.config import ConfigError, DDPConfig, NoSyncConfig, SyncConfig
from ddp_trainer.distributed import World
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.buffers import averaged_statistics, restore_buffers
from ddp_trainer.sync.ddp import DDPSync

__all__ = ["DDPSync", "GradientSync", "averaged_statistics", "build_sync", "restore_buffers"]


def build_sync(config: SyncConfig, world: World) -> GradientSync:
    """Return the strategy that `config` names.

    Raises:
        ConfigError: it cannot serve this world.
    """
    match config:
        case NoSyncConfig():
            if world.world_size > 1:
                raise ConfigError(f"sync=none is for one process and there are {world.world_size} ranks: use sync=ddp")
            return GradientSync()
        case DDPConfig():
            return DDPSync(config, world)
        case SyncConfig():
            raise ConfigError(f"sync.name={config.name!r} is unknown: choose ddp or none")
        case _:
            assert_never(config)
