"""The group ``scheduler``: the learning rate over the steps."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from ddp_trainer.config.errors import NOT_NEGATIVE, POSITIVE, UP_TO_ONE, require, rule
from ddp_trainer.registry import register_scheduler


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    name: str = MISSING
    warmup_epochs: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """Epochs of linear warm-up; fractions are allowed."""


@dataclass(kw_only=True, slots=True)
class ConstantConfig(SchedulerConfig):
    name: str = "constant"


@dataclass(kw_only=True, slots=True)
class StepConfig(SchedulerConfig):
    name: str = "step"
    every_epochs: int = field(default=30, metadata=POSITIVE)
    """Epochs between two drops of the learning rate."""
    gamma: float = field(
        default=0.1, metadata=rule("greater than 0 and at most 1", lambda value: 0 < value <= 1)
    )
    """Factor, in (0, 1], by which the learning rate is multiplied at each drop."""


@dataclass(kw_only=True, slots=True)
class CosineConfig(SchedulerConfig):
    name: str = "cosine"
    warmup_epochs: float = field(default=1.0, metadata=NOT_NEGATIVE)
    final_factor: float = field(default=0.0, metadata=UP_TO_ONE)
    """Learning rate that the step after the last one would have, as a fraction of the peak, in [0,
    1].
    """


@dataclass(kw_only=True, slots=True)
class OneCycleConfig(SchedulerConfig):
    name: str = "onecycle"
    rise: float = field(default=0.3, metadata=rule("between 0 and 1", lambda value: 0 < value < 1))
    """Share of all steps, in (0, 1), in which the learning rate rises."""
    initial_factor: float = field(default=0.04, metadata=UP_TO_ONE)
    """Learning rate at the first step as a fraction of the peak."""
    final_factor: float = field(default=1e-4, metadata=UP_TO_ONE)
    """Learning rate at the last step as a fraction of the peak."""

    def __post_init__(self) -> None:
        require(
            self.warmup_epochs == 0,
            f"scheduler.warmup_epochs={self.warmup_epochs} must be 0: onecycle warms up during"
            " scheduler.rise instead",
        )


register_scheduler(
    "constant", ConstantConfig, builder="ddp_trainer.training.schedulers:build_constant"
)
register_scheduler("step", StepConfig, builder="ddp_trainer.training.schedulers:build_step")
register_scheduler("cosine", CosineConfig, builder="ddp_trainer.training.schedulers:build_cosine")
register_scheduler(
    "onecycle", OneCycleConfig, builder="ddp_trainer.training.schedulers:build_onecycle"
)
