"""Fixtures of the cluster tests."""

from __future__ import annotations

from cluster.slurm import slurm

__all__ = ["slurm"]
