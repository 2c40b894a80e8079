"""The group ``logger``; a run may have several loggers: ``logger=[tensorboard,jsonl]``."""

from enum import StrEnum

from omegaconf import MISSING

from ddp_trainer.config.errors import config_class, setting
from ddp_trainer.registry import register_logger

WandbMode = StrEnum("WandbMode", ["auto", "online", "offline"])


@config_class
class LoggerConfig:
    name: str = MISSING


@config_class
class TensorBoardConfig(LoggerConfig):
    name: str = "tensorboard"


@config_class
class JsonlConfig(LoggerConfig):
    name: str = "jsonl"


@config_class
class WandbConfig(LoggerConfig):
    name: str = "wandb"
    project: str = "ddp_trainer"
    """The project that the run belongs to."""
    entity: str | None = None
    """User or team that the project belongs to; null: the default of your account."""
    mode: WandbMode = WandbMode.auto
    """online: send to the server; offline: write files for `wandb sync`; auto: as WANDB_MODE says,
    else online.
    """
    group: str | None = None
    """A name that related runs share, such as those of a sweep."""
    tags: list[str] = setting([])
    """Labels by which runs can be filtered."""


@config_class
class MlflowConfig(LoggerConfig):
    name: str = "mlflow"
    tracking_uri: str | None = None
    """Address of the server or database; null: MLFLOW_TRACKING_URI, else mlflow.db beside the run
    directory.
    """
    experiment: str = "ddp_trainer"
    """The experiment that the run belongs to; it is created if it does not exist."""


LOGGERS = "ddp_trainer.observers.loggers"

register_logger(
    "tensorboard", TensorBoardConfig, builder=f"{LOGGERS}.tensorboard:TensorBoardLogger"
)
register_logger("jsonl", JsonlConfig, builder=f"{LOGGERS}.jsonl:JsonlLogger")
register_logger("wandb", WandbConfig, builder=f"{LOGGERS}.wandb_run:WandbLogger")
register_logger("mlflow", MlflowConfig, builder=f"{LOGGERS}.mlflow_run:MlflowLogger")
