"""The group ``metric``: further scores of an evaluation, logged as ``eval/<name>``."""

from dataclasses import dataclass

from omegaconf import MISSING

from ddp_trainer.registry import register_metric


@dataclass(kw_only=True, slots=True)
class MetricConfig:
    name: str = MISSING


@dataclass(kw_only=True, slots=True)
class BalancedAccuracyConfig(MetricConfig):
    name: str = "balanced_accuracy"


@dataclass(kw_only=True, slots=True)
class MacroF1Config(MetricConfig):
    name: str = "macro_f1"


METRICS = "ddp_trainer.scores.metrics"

register_metric(
    "balanced_accuracy", BalancedAccuracyConfig, builder=f"{METRICS}:build_balanced_accuracy"
)
register_metric("macro_f1", MacroF1Config, builder=f"{METRICS}:build_macro_f1")
