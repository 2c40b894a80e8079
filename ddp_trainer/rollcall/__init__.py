"""The roll call of nodes: the head holds the port of torchrun's store, the others come, and all hear one verdict.

A node says who it is and what it has; the head compares that with itself. Whoever finds the store of a running
elastic job at the port may join it without more. Imports no torch.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ddp_trainer import __version__
from ddp_trainer.network import StartError

GREETING = b"ddp_trainer preflight\n"
ATTEMPT_SECONDS = 4.0
"""How long one attempt to connect may take; the kernel needs 3 s to say that nobody has the address."""
CLOCK_SECONDS = 5.0
"""How far clocks may be apart: torchrun compares them to see which node is dead, and allows 15 s in all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which nodes are to meet, where, and for how long."""

    node_rank: int
    min_nodes: int
    max_nodes: int
    """More than `min_nodes` in an elastic job."""
    port: int
    timeout: float
    """Seconds to wait for the others."""
    rdzv_id: str | None = None
    """torchrun's name of the job, if a rendezvous found at the port is to be told from another job's."""

    @property
    def nnodes(self) -> str:
        return str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a node says of itself."""

    node_rank: int
    nnodes: str
    address: str = ""
    port: int = 0
    """Where it can be reached for a moment, as gloo and NCCL will want to: a port like any other."""
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    clock_behind: float = 0.0
    """Seconds by which this node's clock is behind the head's, and how sure that is."""
    clock_error: float = 0.0
    fault: str | None = None
    """What this node has itself found wrong."""

    @property
    def name(self) -> str:
        return f"node {self.node_rank} ({self.address})"


class CalledOffError(StartError):
    """The head has told why the start is off."""


def versions() -> dict[str, str]:
    """Return the version of all that has to be the same on all nodes, without importing it.

    Raises:
        StartError: a package is not installed.
    """
    found = {"ddp_trainer": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "torchvision"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise StartError(
                f"{package} is not installed in {sys.prefix}: make .venv/installed, or set PYTHON"
            ) from None
    return found


def closed_fault(what: str) -> str:
    """Say that `what` failed at a port that anybody may use."""
    return (
        f"{what}, and ranks connect to each other on ports that the system picks: let all of them pass the firewall "
        "between the nodes"
    )
