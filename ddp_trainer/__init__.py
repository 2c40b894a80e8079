"""Exact, fast, small: PyTorch DistributedDataParallel training of image classifiers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.images import DataConfig
from ddp_trainer.config.loggers import LoggerConfig
from ddp_trainer.config.losses import LossConfig
from ddp_trainer.config.metrics import MetricConfig
from ddp_trainer.config.models import ModelConfig
from ddp_trainer.config.observers import ObserverConfig
from ddp_trainer.config.optimizers import OptimizerConfig
from ddp_trainer.config.schedulers import SchedulerConfig
from ddp_trainer.config.sync import SyncConfig
from ddp_trainer.registry import (
    register_dataset,
    register_logger,
    register_loss,
    register_metric,
    register_model,
    register_observer,
    register_optimizer,
    register_scheduler,
    register_sync,
)
from ddp_trainer.version import __version__

if TYPE_CHECKING:
    from ddp_trainer.data.dataset import Datasets, ImageTensors
    from ddp_trainer.distributed.world import World
    from ddp_trainer.launchers.local import LaunchError, launch
    from ddp_trainer.observers.loggers.base import Logger
    from ddp_trainer.public_config import Config
    from ddp_trainer.sync.base import GradientSync
    from ddp_trainer.tools.classifier import Classifier, load
    from ddp_trainer.training.run import Observer, TrainingRun
    from ddp_trainer.training_run import run

_IMPORTED_LATER = {
    "Classifier": "tools.classifier",
    "Config": "public_config",
    "Datasets": "data.dataset",
    "GradientSync": "sync.base",
    "ImageTensors": "data.dataset",
    "LaunchError": "launchers.local",
    "Logger": "observers.loggers.base",
    "Observer": "training.run",
    "TrainingRun": "training.run",
    "World": "distributed.world",
    "launch": "launchers.local",
    "load": "tools.classifier",
    "run": "training_run",
}

__all__ = [
    "Classifier",
    "Config",
    "ConfigError",
    "DataConfig",
    "Datasets",
    "GradientSync",
    "ImageTensors",
    "LaunchError",
    "Logger",
    "LoggerConfig",
    "LossConfig",
    "MetricConfig",
    "ModelConfig",
    "Observer",
    "ObserverConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "SyncConfig",
    "TrainingRun",
    "World",
    "__version__",
    "launch",
    "load",
    "register_dataset",
    "register_logger",
    "register_loss",
    "register_metric",
    "register_model",
    "register_observer",
    "register_optimizer",
    "register_scheduler",
    "register_sync",
    "run",
]


def __getattr__(name: str) -> Any:
    """Return the public object `name`, imported when first used, so that --help needs no torch."""
    if name not in _IMPORTED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ddp_trainer.{_IMPORTED_LATER[name]}"), name)
