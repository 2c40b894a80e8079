"""Parts of a user that raise: a loss, a metric and an observer."""

import os
from dataclasses import dataclass

from ddp_trainer import (
    LossConfig,
    MetricConfig,
    Observer,
    ObserverConfig,
    register_loss,
    register_metric,
    register_observer,
)


@dataclass(kw_only=True)
class MeanConfig(LossConfig):
    name: str = "mean"


@register_loss("mean", MeanConfig)
def build_mean(config, *, class_counts):
    from torch.nn.functional import cross_entropy

    return cross_entropy


@dataclass(kw_only=True)
class TextConfig(MetricConfig):
    name: str = "text"


@register_metric("text", TextConfig)
def build_text(config):
    return lambda probabilities, labels: "high"


@dataclass(kw_only=True)
class DivideConfig(ObserverConfig):
    name: str = "divide"
    event: str = "on_step"
    rank: int = 0


@register_observer("divide", DivideConfig)
class Divide(Observer):
    def __init__(self, config):
        self.config = config

    def fail(self, run, event):
        if (event, run.world.rank) == (self.config.event, self.config.rank):
            raise ZeroDivisionError("division by zero")

    def on_step(self, run):
        self.fail(run, "on_step")

    def on_evaluation(self, run):
        self.fail(run, "on_evaluation")

    def on_end(self, run):
        self.fail(run, "on_end")

    def rank_values(self, run):
        self.fail(run, "rank_values")
        return [1.0, 2.0] if self.config.event == "uneven" and run.world.rank == 1 else [1.0]
        return ()

    def summary_values(self, run):
        self.fail(run, "summary_values")
        return {}

    def state_dict(self):
        return {"values": 1 / 0} if self.config.event == "state_dict" else {}


@dataclass(kw_only=True)
class InfiniteConfig(LossConfig):
    name: str = "infinite"
    label: int = -1


@register_loss("infinite", InfiniteConfig)
def build_infinite(config, *, class_counts):
    """Infinite for samples with the label `config.label`; for -1, for all samples."""
    import torch
    from torch.nn.functional import cross_entropy

    def loss(logits, labels):
        is_bad = (labels == config.label) | torch.tensor(config.label < 0)
        return cross_entropy(logits, labels, reduction="none") * torch.where(is_bad, torch.inf, 1.0)

    return loss


@dataclass(kw_only=True)
class WrongConfig(LossConfig):
    name: str = "wrong"
    kind: str = "integers"
    rank: int = -1  # -1: all


@register_loss("wrong", WrongConfig)
def build_wrong(config, *, class_counts):
    from torch.nn.functional import cross_entropy

    def loss(logits, labels):
        losses = cross_entropy(logits, labels, reduction="none")
        if config.rank not in (-1, int(os.environ.get("RANK", "0"))):
            return losses
        if config.kind == "integers":
            return losses.long()
        if config.kind == "detached":
            return losses.detach()
        return losses if len(losses) == 2 else losses.mean()

    return loss


@dataclass(kw_only=True)
class LeavingConfig(MetricConfig):
    name: str = "leaving"


@register_metric("leaving", LeavingConfig)
def build_leaving(config):
    if os.environ.get("RANK") == "1":
        raise SystemExit(0)
    return lambda probabilities, labels: 0.0


@dataclass(kw_only=True)
class ExitConfig(MetricConfig):
    name: str = "exit"


@register_metric("exit", ExitConfig)
def build_exit(config):
    def metric(probabilities, labels):
        raise SystemExit(0)

    return metric
