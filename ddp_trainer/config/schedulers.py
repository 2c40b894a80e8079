"""The group ``scheduler``: the learning rate as a function of the optimizer step."""

from omegaconf import MISSING

from ddp_trainer.config.errors import (
    NOT_NEGATIVE,
    POSITIVE,
    UP_TO_ONE,
    config_class,
    rule,
    setting,
)
from ddp_trainer.registry import register_scheduler


@config_class
class SchedulerConfig:
    name: str = MISSING
    warmup_epochs: float = setting(0.0, NOT_NEGATIVE)
    """Epochs of linear warm-up at the start, or half of the epochs if there are fewer epochs."""


@config_class
class ConstantConfig(SchedulerConfig):
    name: str = "constant"


@config_class
class StepConfig(SchedulerConfig):
    name: str = "step"
    every_epochs: int = setting(30, POSITIVE)
    """Epochs between two drops of the learning rate."""
    gamma: float = setting(0.1, rule("greater than 0 and at most 1", lambda value: 0 < value <= 1))
    """Factor, in (0, 1], by which the learning rate is multiplied at each drop."""


@config_class
class CosineConfig(SchedulerConfig):
    name: str = "cosine"
    warmup_epochs: float = setting(1.0, NOT_NEGATIVE)
    final_factor: float = setting(0.0, UP_TO_ONE)
    """Learning rate after the last step as a fraction of the peak, in [0, 1]."""


@config_class
class OneCycleConfig(SchedulerConfig):
    name: str = "onecycle"
    warmup_epochs: float = setting(
        0.0, rule("0: onecycle warms up during scheduler.rise instead", lambda value: value == 0)
    )
    rise: float = setting(0.3, rule("between 0 and 1", lambda value: 0 < value < 1))
    """Share of all steps, in (0, 1), in which the learning rate rises."""
    initial_factor: float = setting(0.04, UP_TO_ONE)
    """Learning rate at the first step as a fraction of the peak."""
    final_factor: float = setting(1e-4, UP_TO_ONE)
    """Learning rate at the last step as a fraction of the peak."""


register_scheduler(
    "constant", ConstantConfig, builder="ddp_trainer.optim.schedulers:build_constant"
)
register_scheduler("step", StepConfig, builder="ddp_trainer.optim.schedulers:build_step")
register_scheduler("cosine", CosineConfig, builder="ddp_trainer.optim.schedulers:build_cosine")
register_scheduler(
    "onecycle", OneCycleConfig, builder="ddp_trainer.optim.schedulers:build_onecycle"
)
