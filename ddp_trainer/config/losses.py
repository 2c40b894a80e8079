"""The group ``loss``: a loss gives one value per sample; the optimizer minimizes their mean."""

from collections.abc import Mapping
from typing import Any

from omegaconf import MISSING

from ddp_trainer.config.errors import BELOW_ONE, NOT_NEGATIVE, config_class, rule, setting
from ddp_trainer.registry import register_loss


def is_class_weights(value: Any) -> bool:
    """Return whether `value` is a possible value of `LossConfig.class_weights`."""
    if isinstance(value, Mapping):
        return all(isinstance(weight, int | float) and weight >= 0 for weight in value.values())
    return value in ("none", "balanced")


@config_class
class LossConfig:
    name: str = MISSING
    class_weights: Any = setting(
        "none", rule("none, balanced, or {CLASS: weight}", is_class_weights)
    )
    """Factor of the loss of each sample by its class: balanced, in inverse proportion to the size
    of the class, or {CLASS: weight}, 1 for other classes. Scaled to a mean of 1 over the samples.
    """


@config_class
class CrossEntropyConfig(LossConfig):
    name: str = "cross_entropy"
    label_smoothing: float = setting(0.0, BELOW_ONE)
    """Share, in [0, 1), of the target that is spread evenly over all classes."""


@config_class
class FocalConfig(LossConfig):
    name: str = "focal"
    gamma: float = setting(2.0, NOT_NEGATIVE)
    """Exponent: a larger value reduces the loss of samples that are classified well."""


@config_class
class BCEConfig(LossConfig):
    name: str = "bce"


register_loss(
    "cross_entropy", CrossEntropyConfig, builder="ddp_trainer.optim.losses:build_cross_entropy"
)
register_loss("focal", FocalConfig, builder="ddp_trainer.optim.losses:build_focal")
register_loss("bce", BCEConfig, builder="ddp_trainer.optim.losses:build_bce")
