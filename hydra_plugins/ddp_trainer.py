"""The launchers, in this folder because Hydra instantiates no launchers from other folders."""

from ddp_trainer.launchers.sweeps import slurm, torchrun


class TorchrunLauncher(torchrun.TorchrunLauncher):
    """``hydra/launcher=torchrun``."""


class SlurmLauncher(slurm.SlurmLauncher):
    """``hydra/launcher=slurm``."""
