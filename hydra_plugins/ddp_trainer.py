"""Our launchers where Hydra looks for plugins: it makes a launcher only of a class that lives in `hydra_plugins`."""

from __future__ import annotations

from ddp_trainer.launchers import slurm, torchrun


class TorchrunLauncher(torchrun.TorchrunLauncher):
    """``hydra/launcher=torchrun``."""


class SlurmLauncher(slurm.SlurmLauncher):
    """``hydra/launcher=slurm``."""
