"""The group ``scheduler``: the learning rate over the steps."""

from dataclasses import dataclass

from omegaconf import MISSING

from ddp_trainer.config.errors import require, require_positive
from ddp_trainer.registry import register_scheduler


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    name: str = MISSING
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up; may be a fraction."""

    def __post_init__(self) -> None:
        require(self.warmup_epochs >= 0, f"scheduler.warmup_epochs={self.warmup_epochs} must be 0 or more")


@dataclass(kw_only=True, slots=True)
class ConstantConfig(SchedulerConfig):
    name: str = "constant"


@dataclass(kw_only=True, slots=True)
class StepConfig(SchedulerConfig):
    name: str = "step"
    every_epochs: int = 30
    """Epochs between two drops."""
    gamma: float = 0.1
    """Factor of each drop, in (0, 1]."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require_positive("scheduler.every_epochs", self.every_epochs)
        require(0 < self.gamma <= 1, f"scheduler.gamma={self.gamma} must be greater than 0 and at most 1")


@dataclass(kw_only=True, slots=True)
class CosineConfig(SchedulerConfig):
    name: str = "cosine"
    warmup_epochs: float = 1.0
    """Epochs of linear warm-up; may be a fraction."""
    final_factor: float = 0.0
    """Learning rate at the last step as a fraction of the peak, in [0, 1]."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require(0 <= self.final_factor <= 1, f"scheduler.final_factor={self.final_factor} must be in [0, 1]")


@dataclass(kw_only=True, slots=True)
class OneCycleConfig(SchedulerConfig):
    name: str = "onecycle"
    rise: float = 0.3
    """Share of all steps, in (0, 1), in which the learning rate rises."""
    initial_factor: float = 0.04
    """Learning rate at the first step as a fraction of the peak."""
    final_factor: float = 1e-4
    """Learning rate at the last step as a fraction of the peak."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require(0 < self.rise < 1, f"scheduler.rise={self.rise} must be between 0 and 1")
        require(
            self.warmup_epochs == 0,
            f"scheduler.warmup_epochs={self.warmup_epochs} must be 0: onecycle climbs by scheduler.rise instead",
        )
        for key in ("initial_factor", "final_factor"):
            require(0 <= getattr(self, key) <= 1, f"scheduler.{key}={getattr(self, key)} must be in [0, 1]")


register_scheduler("constant", ConstantConfig, builder="ddp_trainer.training.schedulers:build_constant")
register_scheduler("step", StepConfig, builder="ddp_trainer.training.schedulers:build_step")
register_scheduler("cosine", CosineConfig, builder="ddp_trainer.training.schedulers:build_cosine")
register_scheduler("onecycle", OneCycleConfig, builder="ddp_trainer.training.schedulers:build_onecycle")
