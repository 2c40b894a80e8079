"""Strategies that keep a model's replicas equal: subclasses of `GradientSync`, one per file."""

from ddp_trainer import registry
from ddp_trainer.config.errors import require
from ddp_trainer.config.sync import SyncConfig
from ddp_trainer.distributed.world import World
from ddp_trainer.sync.base import GradientSync


def build_sync(config: SyncConfig, world: World) -> GradientSync:
    """Return the strategy that `config` chooses; ConfigError if it cannot run on these devices."""
    require(
        not config.point_to_point or world.device.type == "cpu" or world.backend != "gloo",
        f"sync={config.name} sends tensors between two ranks, which backend=gloo cannot do for"
        " GPUs: use backend=nccl, device=cpu, or sync=ddp",
    )
    return registry.build("sync", config, world, returns=GradientSync)
