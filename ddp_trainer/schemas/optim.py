"""The groups optimizer and scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ddp_trainer.schemas.rules import require, require_positive


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    name: str = MISSING
    lr: float = MISSING
    """Peak learning rate for the global batch as given."""
    weight_decay: float = 0.0
    """sgd: added to the gradient, times the weights; adamw: taken off the weights, times lr."""
    scale_lr: bool = False
    """Linear rule: multiply lr by global_batch_size / base_batch_size."""
    base_batch_size: int = 256
    """The global batch that `lr` was chosen for; read only when scale_lr is on."""

    def __post_init__(self) -> None:
        require_positive("optimizer.lr", self.lr)
        require_positive("optimizer.base_batch_size", self.base_batch_size)
        require(self.weight_decay >= 0, f"optimizer.weight_decay={self.weight_decay} must be 0 or more")

    def scaled_lr(self, global_batch_size: int) -> float:
        """Return the learning rate for `global_batch_size` samples a step."""
        return self.lr * global_batch_size / self.base_batch_size if self.scale_lr else self.lr

    @property
    def state_tensors(self) -> int:
        """The tensors, as large as it, that the optimizer keeps of each parameter."""
        return 0


@dataclass(kw_only=True, slots=True)
class SGDConfig(OptimizerConfig):
    name: str = "sgd"
    lr: float = 0.1
    """Peak learning rate for the global batch as given."""
    momentum: float = 0.9
    """Share of the former step, in [0, 1), that the next one keeps."""
    nesterov: bool = False
    """Look ahead along the momentum."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must be in [0, 1)")
        require(
            not self.nesterov or self.momentum > 0,
            "optimizer.nesterov=true needs momentum: set optimizer.momentum above 0",
        )

    @property
    def state_tensors(self) -> int:
        """The tensors, as large as it, that the optimizer keeps of each parameter."""
        return 1 if self.momentum > 0 else 0


@dataclass(kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    name: str = "adamw"
    lr: float = 1e-3
    """Peak learning rate for the global batch as given."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Shares, in [0, 1), that the running means of gradients and of their squares keep a step."""
    eps: float = 1e-8
    """Added to the denominator."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require_positive("optimizer.eps", self.eps)
        check_betas(self.betas)

    @property
    def state_tensors(self) -> int:
        """The tensors, as large as it, that the optimizer keeps of each parameter."""
        return 2


def check_betas(betas: list[float]) -> None:
    """Refuse anything but two shares."""
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        f"optimizer.betas={betas} must be two values in [0, 1)",
    )


@dataclass(kw_only=True, slots=True)
class LARSConfig(OptimizerConfig):
    name: str = "lars"
    lr: float = 5.0
    """Peak learning rate for the global batch as given, before the trust ratio of each layer."""
    momentum: float = 0.9
    """Share of the former step, in [0, 1), that the next one keeps."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    trust_coefficient: float = 0.001
    """Length of a layer's step over the length of its weights, at learning rate 1."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require(0 <= self.momentum < 1, f"optimizer.momentum={self.momentum} must be in [0, 1)")
        require_positive("optimizer.trust_coefficient", self.trust_coefficient)

    @property
    def state_tensors(self) -> int:
        """The tensors, as large as it, that the optimizer keeps of each parameter."""
        return 1 if self.momentum > 0 else 0


@dataclass(kw_only=True, slots=True)
class LAMBConfig(OptimizerConfig):
    name: str = "lamb"
    lr: float = 1e-2
    """Peak learning rate for the global batch as given, before the trust ratio of each layer."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Shares, in [0, 1), that the running means of gradients and of their squares keep a step."""
    eps: float = 1e-6
    """Added to the denominator."""

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        require_positive("optimizer.eps", self.eps)
        check_betas(self.betas)

    @property
    def state_tensors(self) -> int:
        """The tensors, as large as it, that the optimizer keeps of each parameter."""
        return 2


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    name: str = MISSING
    warmup_epochs: float = 0.0
    """Epochs (fractions count) over which the learning rate climbs linearly to its peak."""

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
    """Factor of each drop."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require_positive("scheduler.every_epochs", self.every_epochs)
        require_positive("scheduler.gamma", self.gamma)


@dataclass(kw_only=True, slots=True)
class CosineConfig(SchedulerConfig):
    name: str = "cosine"
    final_factor: float = 0.0
    """Learning rate at the last step over the peak, in [0, 1]."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require(0 <= self.final_factor <= 1, f"scheduler.final_factor={self.final_factor} must be in [0, 1]")


@dataclass(kw_only=True, slots=True)
class OneCycleConfig(SchedulerConfig):
    name: str = "onecycle"
    rise: float = 0.3
    """Share of all steps, in (0, 1), spent climbing."""
    initial_factor: float = 0.04
    """Learning rate at the first step over the peak."""
    final_factor: float = 1e-4
    """Learning rate at the last step over the peak."""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        require(0 < self.rise < 1, f"scheduler.rise={self.rise} must be between 0 and 1")
        require(
            self.warmup_epochs == 0,
            f"scheduler.warmup_epochs={self.warmup_epochs}: onecycle has its own climb, set scheduler.rise instead",
        )
        for key in ("initial_factor", "final_factor"):
            require(0 <= getattr(self, key) <= 1, f"scheduler.{key}={getattr(self, key)} must be in [0, 1]")
