"""The group ``metric``: additional scores of an evaluation, logged as ``eval/<name>``."""

from collections.abc import Mapping
from typing import ClassVar

from omegaconf import MISSING

from ddp_trainer.config.errors import POSITIVE, config_class, require, setting
from ddp_trainer.registry import register_metric


@config_class
class MetricConfig:
    higher_is_better: ClassVar[bool] = True
    """Whether a larger value is a better one, for `select_by` and early stopping."""

    name: str = MISSING


@config_class
class BalancedAccuracyConfig(MetricConfig):
    name: str = "balanced_accuracy"


@config_class
class MacroF1Config(MetricConfig):
    name: str = "macro_f1"


@config_class
class TopKConfig(MetricConfig):
    name: str = "topk"
    k: int = setting(5, POSITIVE)
    """A sample counts if its class is among the k most probable ones."""


@config_class
class AUROCConfig(MetricConfig):
    name: str = "auroc"


def check_value(key: str, value: str, metrics: Mapping[str, MetricConfig]) -> None:
    """Raise ConfigError unless an evaluation has `value`, such as eval/loss.

    key: the config key with this value, for the message. metrics: the chosen metrics by name.
    """
    values = ["eval/top1", "eval/loss", *(f"eval/{name}" for name in metrics)]
    require(
        value in values,
        f"{key}={value} is no value of the evaluation: choose from {', '.join(values)};"
        " metric=[NAME] adds eval/NAME",
    )


METRICS = "ddp_trainer.scores.metrics"

register_metric(
    "balanced_accuracy", BalancedAccuracyConfig, builder=f"{METRICS}:build_balanced_accuracy"
)
register_metric("macro_f1", MacroF1Config, builder=f"{METRICS}:build_macro_f1")
register_metric("topk", TopKConfig, builder=f"{METRICS}:build_topk")
register_metric("auroc", AUROCConfig, builder=f"{METRICS}:build_auroc")
