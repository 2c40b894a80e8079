"""The group ``logger``, of which a run may have several: ``logger=[tensorboard,jsonl]``."""

from dataclasses import dataclass

from omegaconf import MISSING

from ddp_trainer.registry import register_logger


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class TensorBoardConfig(LoggerConfig):
    name: str = "tensorboard"


@dataclass(kw_only=True, slots=True)
class JsonlConfig(LoggerConfig):
    name: str = "jsonl"


register_logger("tensorboard", TensorBoardConfig, builder="ddp_trainer.loggers.tensorboard:TensorBoardLogger")
register_logger("jsonl", JsonlConfig, builder="ddp_trainer.loggers.jsonl:JsonlLogger")
