"""The group ``optimizer``."""

from contextlib import suppress
from typing import ClassVar

from omegaconf import MISSING

from ddp_trainer.config.errors import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    config_class,
    require,
    rule,
    setting,
)
from ddp_trainer.registry import register_optimizer


@config_class
class OptimizerConfig:
    skips_nonfinite: ClassVar[bool] = False
    """Whether ``step()`` skips the update if ``found_inf`` is 1, as torch's fused optimizers do."""

    is_elementwise: ClassVar[bool] = False
    """Whether the update of an element depends on no other element, as parts of tensors need."""

    name: str = MISSING
    lr: float = setting(0.1, POSITIVE)
    """Peak learning rate; it does not depend on the global batch size unless scale_lr is true."""
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    """Weight decay, added to the gradient (sgd, lars) or to the update, times lr (adamw, lamb)."""
    scale_lr: bool = False
    """Linear rule: multiply lr by global_batch_size / base_batch_size."""
    base_batch_size: int = setting(256, POSITIVE)
    """The global batch size that `lr` was chosen for; used only if scale_lr is true."""

    def scaled_lr(self, global_batch_size: int) -> float:
        """Return the learning rate for steps of `global_batch_size` samples."""
        return self.lr * global_batch_size / self.base_batch_size if self.scale_lr else self.lr


@config_class
class MomentumConfig(OptimizerConfig):
    momentum: float = setting(0.9, BELOW_ONE)
    """Momentum factor, in [0, 1)."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    def __post_init__(self) -> None:
        with suppress(TypeError):  # `Config` names a value of a wrong type
            require(
                not self.nesterov or self.momentum > 0,
                "optimizer.nesterov=true needs momentum: set optimizer.momentum above 0",
            )


@config_class
class AdamConfig(OptimizerConfig):
    betas: list[float] = setting(
        [0.9, 0.999],
        rule("two values in [0, 1)", lambda two: len(two) == 2 and min(two) >= 0 and max(two) < 1),
    )
    """Decay rates, in [0, 1), of the running means of the gradient and of its square."""
    eps: float = setting(1e-8, POSITIVE)
    """Number added to the denominator of the update, so that it is never 0."""


@config_class
class SGDConfig(MomentumConfig):
    name: str = "sgd"
    skips_nonfinite: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    lr: float = setting(0.05, POSITIVE)
    nesterov: bool = True
    weight_decay: float = setting(5e-4, NOT_NEGATIVE)


@config_class
class AdamWConfig(AdamConfig):
    name: str = "adamw"
    skips_nonfinite: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    lr: float = setting(1e-3, POSITIVE)


@config_class
class LARSConfig(MomentumConfig):
    name: str = "lars"
    lr: float = setting(5.0, POSITIVE)
    """Peak learning rate; each layer's update is also multiplied by the layer's trust ratio."""
    weight_decay: float = setting(5e-5, POSITIVE)
    """Weight decay, added to the gradient. Biases and normalization layers have no weight decay
    and no trust ratio.
    """
    trust_coefficient: float = setting(0.001, POSITIVE)
    """Norm of a layer's update divided by the norm of its weights, at lr=1 without momentum."""


@config_class
class LAMBConfig(AdamConfig):
    name: str = "lamb"
    lr: float = setting(1e-2, POSITIVE)
    """Peak learning rate; each layer's update is also multiplied by the layer's trust ratio."""
    weight_decay: float = setting(0.01, POSITIVE)
    """Weight decay, added to the update before the trust ratio. Biases and normalization layers
    have no weight decay and no trust ratio.
    """
    eps: float = setting(1e-6, POSITIVE)


register_optimizer("sgd", SGDConfig, builder="ddp_trainer.optim.optimizers:build_sgd")
register_optimizer("adamw", AdamWConfig, builder="ddp_trainer.optim.optimizers:build_adamw")
register_optimizer("lars", LARSConfig, builder="ddp_trainer.optim.optimizers:build_lars")
register_optimizer("lamb", LAMBConfig, builder="ddp_trainer.optim.optimizers:build_lamb")
