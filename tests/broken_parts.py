"""Parts of a user that raise, return something wrong, or have a state that cannot be saved."""

import os
from dataclasses import dataclass

from ddp_trainer import (
    LossConfig,
    MetricConfig,
    ModelConfig,
    Observer,
    ObserverConfig,
    SchedulerConfig,
    register_loss,
    register_metric,
    register_model,
    register_observer,
    register_scheduler,
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
class InPlaceConfig(MetricConfig):
    name: str = "in_place"


@register_metric("in_place", InPlaceConfig)
def build_in_place(config):
    return lambda probabilities, labels: probabilities.log_().mean()


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


@dataclass(kw_only=True)
class UnsavedConfig(ModelConfig):
    name: str = "unsaved"
    kind: str = "mask"


@register_model("unsaved", UnsavedConfig)
def build_unsaved(config, *, image_shape, num_classes):
    import math

    import torch
    from torch import nn

    class WithExtraState(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    layer = WithExtraState if config.kind == "extra" else nn.Linear
    model = nn.Sequential(nn.Flatten(), layer(math.prod(image_shape), num_classes))
    if config.kind == "mask":
        model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    return model


@dataclass(kw_only=True)
class NumpyConfig(SchedulerConfig):
    name: str = "numpy"


@register_scheduler("numpy", NumpyConfig)
def build_numpy(config, *, steps_per_epoch, total_steps):
    import numpy as np

    return lambda step: 0.5 * (1 + np.cos(np.pi * step / total_steps))


@dataclass(kw_only=True)
class GrowingConfig(ObserverConfig):
    name: str = "growing"


@register_observer("growing", GrowingConfig)
class Growing(Observer):
    """Its state has a tuple that is too long for a checkpoint from step 3 on."""

    def __init__(self, config):
        self.steps = 0

    def on_step(self, run):
        self.steps += 1

    def state_dict(self):
        return {"values": tuple(range(100_001 if self.steps > 2 else 0))}


@dataclass(kw_only=True)
class ThreadConfig(ObserverConfig):
    name: str = "thread"


@register_observer("thread", ThreadConfig)
class Thread(Observer):
    """Starts a thread that lasts longer than the training."""

    def __init__(self, config):
        pass

    def on_end(self, run):
        import threading
        import time

        threading.Thread(target=time.sleep, args=[7.0], name="poller").start()
