"""Fixtures of the cluster tests."""

from cluster.slurm import slurm

__all__ = ["slurm"]
