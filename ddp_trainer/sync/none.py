"""One process: there is nothing to synchronize."""

from ddp_trainer.config.sync import NoSyncConfig
from ddp_trainer.distributed.process_group import World
from ddp_trainer.sync.base import GradientSync


def build_none(config: NoSyncConfig, world: World) -> GradientSync:
    """Return the base class, whose methods do nothing."""
    return GradientSync()
