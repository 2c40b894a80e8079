"""The launchers for Hydra, which instantiates only launchers whose class is defined in
`hydra_plugins`.
"""

from ddp_trainer.launchers.sweeps import slurm, torchrun


class TorchrunLauncher(torchrun.TorchrunLauncher):
    """``hydra/launcher=torchrun``."""


class SlurmLauncher(slurm.SlurmLauncher):
    """``hydra/launcher=slurm``."""
