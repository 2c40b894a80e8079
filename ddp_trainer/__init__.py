"""Exact, fast, small: PyTorch DistributedDataParallel training of image classifiers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_trainer.config.data import DataConfig as DataConfig
from ddp_trainer.config.errors import ConfigError as ConfigError
from ddp_trainer.config.loggers import LoggerConfig as LoggerConfig
from ddp_trainer.config.losses import LossConfig as LossConfig
from ddp_trainer.config.metrics import MetricConfig as MetricConfig
from ddp_trainer.config.models import ModelConfig as ModelConfig
from ddp_trainer.config.observers import ObserverConfig as ObserverConfig
from ddp_trainer.config.optimizers import OptimizerConfig as OptimizerConfig
from ddp_trainer.config.schedulers import SchedulerConfig as SchedulerConfig
from ddp_trainer.config.schema import Config as Config
from ddp_trainer.config.sync import SyncConfig as SyncConfig
from ddp_trainer.registry import register_dataset as register_dataset
from ddp_trainer.registry import register_logger as register_logger
from ddp_trainer.registry import register_loss as register_loss
from ddp_trainer.registry import register_metric as register_metric
from ddp_trainer.registry import register_model as register_model
from ddp_trainer.registry import register_observer as register_observer
from ddp_trainer.registry import register_optimizer as register_optimizer
from ddp_trainer.registry import register_scheduler as register_scheduler
from ddp_trainer.registry import register_sync as register_sync
from ddp_trainer.version import __version__ as __version__

if TYPE_CHECKING:
    from ddp_trainer.data.dataset import Datasets as Datasets
    from ddp_trainer.data.dataset import ImageTensors as ImageTensors
    from ddp_trainer.distributed.process_group import World as World
    from ddp_trainer.observers.loggers.base import Logger as Logger
    from ddp_trainer.sync.base import GradientSync as GradientSync
    from ddp_trainer.tools.classifier import Classifier as Classifier
    from ddp_trainer.tools.classifier import load as load
    from ddp_trainer.training.trainer import Trainer as Trainer
    from ddp_trainer.training_run import run as run

_MODULES = {
    "Classifier": "tools.classifier",
    "Datasets": "data.dataset",
    "GradientSync": "sync.base",
    "ImageTensors": "data.dataset",
    "Logger": "observers.loggers.base",
    "Trainer": "training.trainer",
    "World": "distributed.process_group",
    "load": "tools.classifier",
    "run": "training_run",
}


def __getattr__(name: str) -> Any:
    """Return the public object `name`, imported at its first use so that ``--help`` does not import
    torch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ddp_trainer.{_MODULES[name]}"), name)
