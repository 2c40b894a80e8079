"""Four extensions of ddp_trainer: importing this module registers them.

Builders are given by name, so that this module imports no torch: ``--help`` and errors in the
config come at once.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from ddp_trainer import (
    ConfigError,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    SyncConfig,
    register_dataset,
    register_logger,
    register_model,
    register_sync,
)


@dataclass(kw_only=True)
class ConvMixerConfig(ModelConfig):
    name: str = "convmixer"
    width: int = 16
    """Channels of every layer."""
    depth: int = 2
    """Number of blocks."""
    patch_size: int = 2
    """Side of the patches that the first layer cuts an image into, in pixels."""


@dataclass(kw_only=True)
class ShapesConfig(DataConfig):
    name: str = "shapes"
    mean: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])
    std: list[float] = field(default_factory=lambda: [0.3, 0.3, 0.3])
    num_train: int = 300
    """Training images."""
    num_eval: int = 61
    """Evaluation images."""
    size: int = 24
    """Height and width in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 8:
            raise ConfigError(f"data.size={self.size} must be at least 8 pixels")


@dataclass(kw_only=True)
class TagFilesConfig(LoggerConfig):
    name: str = "tag_files"
    digits: int = 6
    """Significant digits of a value."""


@dataclass(kw_only=True)
class ReduceBroadcastConfig(SyncConfig):
    point_to_point: ClassVar[bool] = True  # gloo has no reduce for tensors on a GPU

    name: str = "reduce_broadcast"


register_model("convmixer", ConvMixerConfig, builder="example_plugin.convmixer:build_convmixer")
register_dataset("shapes", ShapesConfig, builder="example_plugin.shapes:build_shapes")
register_logger("tag_files", TagFilesConfig, builder="example_plugin.tag_files:TagFilesLogger")
register_sync(
    "reduce_broadcast",
    ReduceBroadcastConfig,
    builder="example_plugin.reduce_broadcast:ReduceBroadcastSync",
)
