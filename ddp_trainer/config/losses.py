"""The group ``loss``: the value that each sample adds to the sum that the optimizer minimizes."""

from dataclasses import dataclass

from omegaconf import MISSING

from ddp_trainer.config.errors import BELOW_ONE, setting
from ddp_trainer.registry import register_loss


@dataclass(kw_only=True, slots=True)
class LossConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class CrossEntropyConfig(LossConfig):
    name: str = "cross_entropy"
    label_smoothing: float = setting(0.0, BELOW_ONE)
    """Share, in [0, 1), of the target that is spread evenly over all classes."""


register_loss(
    "cross_entropy", CrossEntropyConfig, builder="ddp_trainer.training.losses:build_cross_entropy"
)
