"""Hydra launchers: a sweep whose jobs are processes of their own, here or on a SLURM cluster.

``--multirun hydra/launcher=torchrun`` or ``slurm``. Both freeze each job's config into a job file.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from ddp_trainer.launchers.slurm import SlurmLauncherConfig
from ddp_trainer.launchers.torchrun import TorchrunLauncherConfig


def register_launchers() -> None:
    """Offer ``hydra/launcher=torchrun`` and ``slurm``: here and not in the plugin, which every Hydra program reads."""
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="torchrun", node=TorchrunLauncherConfig)
    store.store(group="hydra/launcher", name="slurm", node=SlurmLauncherConfig)
