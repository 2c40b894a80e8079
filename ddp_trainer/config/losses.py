"""The group ``loss``."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ddp_trainer.config.errors import BELOW_ONE
from ddp_trainer.registry import register_loss


@dataclass(kw_only=True, slots=True)
class LossConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class CrossEntropyConfig(LossConfig):
    name: str = "cross_entropy"
    label_smoothing: float = field(default=0.0, metadata=BELOW_ONE)
    """Share, in [0, 1), of the target that is spread evenly over all classes."""


register_loss(
    "cross_entropy", CrossEntropyConfig, builder="ddp_trainer.training.losses:build_cross_entropy"
)
