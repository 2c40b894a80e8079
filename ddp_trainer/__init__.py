"""Exact, fast, small: PyTorch DistributedDataParallel training of image classifiers."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_trainer.config import Config
    from ddp_trainer.run import run
    from ddp_trainer.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Config", "Trainer", "__version__", "run"]

_HOMES = {"Config": "ddp_trainer.config", "Trainer": "ddp_trainer.trainer", "run": "ddp_trainer.run"}


if "OMP_WAIT_POLICY" not in os.environ:
    # A thread that waits for its siblings gives its core up after microseconds, not milliseconds: two runs that share
    # cores would keep each other from working. Here, as libgomp reads it once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """Import the public names on first use: ``--help`` and completion need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
