"""Fixtures of the cluster tests."""

from collections.abc import Iterator

import pytest

from cluster.jobs import jobs, undisturbed
from cluster.namespaces import NEEDS, Hosts, can_make_hosts
from cluster.slurm import slurm

__all__ = ["jobs", "slurm", "undisturbed"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Four hosts."""
    if not can_make_hosts():
        pytest.skip(NEEDS)
    with Hosts(4) as made:
        yield made
