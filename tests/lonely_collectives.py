"""Parts of a user that call a collective of torch.distributed on one rank only, or another one."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddp_trainer import (
    DataConfig,
    Datasets,
    Logger,
    LoggerConfig,
    LossConfig,
    MetricConfig,
    Observer,
    ObserverConfig,
    register_dataset,
    register_logger,
    register_loss,
    register_metric,
    register_observer,
)

FUNCTION = os.environ.get("LONELY_FUNCTION", "all_reduce")
OTHER = os.environ.get("LONELY_OTHER")
"""The collective that the other rank calls; None: it calls none."""
RANK = int(os.environ.get("LONELY_RANK", "0"))


def call_on_one_rank() -> None:
    """Call the chosen collective on rank `RANK`, and another one on the other rank if chosen."""
    import torch
    import torch.distributed as dist

    function = None
    if dist.is_initialized():
        function = FUNCTION if dist.get_rank() == RANK else OTHER
    if function:
        value = torch.ones(3)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(value),
            "broadcast": lambda: dist.broadcast(value, src=1 - RANK),
            "barrier": lambda: dist.barrier(),
            "all_gather": lambda: dist.all_gather([value, value.clone()], value),
            "all_gather_object": lambda: dist.all_gather_object([0, 0], 1),
            "reduce": lambda: dist.reduce(value, dst=RANK),
            "broadcast_object_list": lambda: dist.broadcast_object_list([0], src=1 - RANK),
            "recv": lambda: dist.recv(value, src=1 - RANK),
        }
        calls[function]()


@dataclass(kw_only=True)
class LonelyLoggerConfig(LoggerConfig):
    name: str = "lonely"
    in_background: bool = False


class LonelyLogger(Logger):
    def __init__(self, in_background: bool) -> None:
        type(self).in_background = in_background

    def scalars(self, values, step):
        if "train/loss" in values:
            call_on_one_rank()


@register_logger("lonely", LonelyLoggerConfig)
def build_lonely(config: LonelyLoggerConfig, run_dir: Path) -> Logger:
    return LonelyLogger(config.in_background)


@dataclass(kw_only=True)
class LonelyObserverConfig(ObserverConfig):
    name: str = "lonely"
    event: str = "on_step"


@register_observer("lonely", LonelyObserverConfig)
class LonelyObserver(Observer):
    def __init__(self, config: LonelyObserverConfig) -> None:
        self.event = config.event

    def call(self, event: str) -> None:
        if event == self.event:
            call_on_one_rank()

    def on_start(self, run):
        self.call("on_start")

    def on_step(self, run):
        self.call("on_step")

    def on_log(self, run):
        self.call("on_log")

    def on_evaluation(self, run):
        self.call("on_evaluation")

    def on_save(self, run):
        self.call("on_save")

    def rank_values(self, run):
        self.call("rank_values")
        return ()


@dataclass(kw_only=True)
class LonelyLossConfig(LossConfig):
    name: str = "lonely"


@register_loss("lonely", LonelyLossConfig)
def build_lonely_loss(config: LonelyLossConfig, *, class_counts):
    from torch.nn.functional import cross_entropy

    def loss(logits, labels):
        call_on_one_rank()
        return cross_entropy(logits, labels, reduction="none")

    return loss


@dataclass(kw_only=True)
class LonelyMetricConfig(MetricConfig):
    name: str = "lonely"


@register_metric("lonely", LonelyMetricConfig)
def build_lonely_metric(config: LonelyMetricConfig):
    def metric(probabilities, labels) -> float:
        call_on_one_rank()
        return 0.5

    return metric


@dataclass(kw_only=True)
class LonelyDataConfig(DataConfig):
    name: str = "lonely"


@register_dataset("lonely", LonelyDataConfig)
def build_lonely_data(config: LonelyDataConfig) -> Datasets:
    import torch

    class Images(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 96

        def __getitem__(self, index: int):
            if index == 50:
                call_on_one_rank()
            return torch.full((1, 12, 12), index, dtype=torch.uint8), index % 2

    images = Images()
    return Datasets(train=images, eval=images, class_names=["even", "odd"])


@dataclass(kw_only=True)
class ForgerConfig(ObserverConfig):
    name: str = "forger"
    value: str = "0"


@register_observer("forger", ForgerConfig)
class Forger(Observer):
    """Writes to the store of the failure monitors, as another program could."""

    def __init__(self, config: ForgerConfig) -> None:
        self.value = config.value

    def on_step(self, run):
        if run.world.is_main and run.step == 3:
            vars(run.events.observers["failures"])["_board"].store.set("root_cause", self.value)
