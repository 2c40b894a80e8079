"""The group data."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ddp_trainer.schemas.rules import require, require_positive


@dataclass(kw_only=True, slots=True)
class AugmentConfig:
    crop_padding: int = 0
    """Zero pixels added on each side before a random crop back to the original size; 0: no crop."""
    flip: bool = False
    """Mirror half of the images left to right."""
    erase: float = 0.0
    """Probability in [0, 1] of blanking one random rectangle (2 to 33 % of the area) of an image."""

    def __post_init__(self) -> None:
        require(
            self.crop_padding >= 0,
            f"data.augment.crop_padding={self.crop_padding} must be 0 (no crop) or more pixels",
        )
        require(
            0 <= self.erase <= 1,
            f"data.augment.erase={self.erase} is a probability: choose a value in [0, 1]",
        )


def check_crop(augment: AugmentConfig, *, height: int, width: int) -> None:
    """Refuse a crop that may miss the image altogether.

    Raises:
        ConfigError: the border is as wide as the image or wider.
    """
    require(
        augment.crop_padding < min(height, width),
        f"data.augment.crop_padding={augment.crop_padding} must be smaller than the images of {height}×{width} pixels",
    )


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = MISSING
    mean: list[float] = MISSING
    """Per channel, on pixels scaled to [0, 1]; subtracted after augmentation."""
    std: list[float] = MISSING
    """Per channel; divided by after the mean is subtracted."""
    validation_fraction: float = 0.0
    """Share, in [0, 1), of the training split that is held out and evaluated on in place of the test split.

    For choosing hyperparameters; 0 trains on all of it and evaluates on the test split.
    """
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        require(
            len(self.mean) == len(self.std) > 0,
            f"data.mean={self.mean} and data.std={self.std} must have one value per channel each",
        )
        require(all(s > 0 for s in self.std), f"data.std={self.std} must be greater than 0 in every channel")
        require(
            0 <= self.validation_fraction < 1,
            f"data.validation_fraction={self.validation_fraction} must be in [0, 1): 0.1 holds a tenth out",
        )


@dataclass(kw_only=True, slots=True)
class DigitsConfig(DataConfig):
    name: str = "digits"


@dataclass(kw_only=True, slots=True)
class FashionMnistConfig(DataConfig):
    name: str = "fashion_mnist"
    root: str | None = None
    """Folder with the four IDX files (gz or not); null: Debian's, else ~/.cache, downloaded once."""


@dataclass(kw_only=True, slots=True)
class SyntheticConfig(DataConfig):
    name: str = "synthetic"
    num_train: int = 4096
    """Training images."""
    num_eval: int = 512
    """Evaluation images."""
    channels: int = 3
    """As many values as mean and std have."""
    height: int = 32
    """Pixels."""
    width: int = 32
    """Pixels."""
    num_classes: int = 10
    """2 to 256."""

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        for key in ("num_train", "num_eval", "channels", "height", "width"):
            require_positive(f"data.{key}", getattr(self, key))
        require(2 <= self.num_classes <= 256, f"data.num_classes={self.num_classes} must be 2 to 256")
        require(
            len(self.mean) == self.channels,
            f"data.mean={self.mean} must have one value per channel, and so must data.std: "
            f"data.channels={self.channels}",
        )
        check_crop(self.augment, height=self.height, width=self.width)
