"""Hydra launchers, which run each job of a sweep in its own processes, here or under SLURM."""

from hydra.core.config_store import ConfigStore

from ddp_trainer.launchers.sweeps.slurm import SlurmLauncherConfig
from ddp_trainer.launchers.sweeps.torchrun import TorchrunLauncherConfig


def register_launchers() -> None:
    """Register ``hydra/launcher=torchrun`` and ``slurm``, which other Hydra programs do not see."""
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="torchrun", node=TorchrunLauncherConfig)
    store.store(group="hydra/launcher", name="slurm", node=SlurmLauncherConfig)
