"""Hydra launchers: they run each job of a sweep in its own processes, on this machine or on a SLURM
cluster.
"""

from hydra.core.config_store import ConfigStore

from ddp_trainer.launchers.sweeps.slurm import SlurmLauncherConfig
from ddp_trainer.launchers.sweeps.torchrun import TorchrunLauncherConfig


def register_launchers() -> None:
    """Register ``hydra/launcher=torchrun`` and ``slurm`` in this process, not in every program that
    uses Hydra.
    """
    for name, schema in (("torchrun", TorchrunLauncherConfig), ("slurm", SlurmLauncherConfig)):
        ConfigStore.instance().store(group="hydra/launcher", name=name, node=schema)
