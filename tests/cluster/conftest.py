"""Fixtures of the cluster tests."""

from cluster.namespaces import hosts
from cluster.slurm import slurm

__all__ = ["hosts", "slurm"]
