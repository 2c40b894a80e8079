"""The config of every data set: augmentation, normalization, and how its images are read."""

from contextlib import suppress
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from ddp_trainer.config.errors import (
    BELOW_ONE,
    FREE,
    NOT_NEGATIVE,
    UP_TO_ONE,
    config_class,
    require,
    rule,
    setting,
)

OnBadImage = StrEnum("OnBadImage", ["error", "skip"])
Sampling = StrEnum("Sampling", ["uniform", "balanced", "sqrt", "weights"])


@config_class
class AugmentConfig:
    random_crop_padding: int = setting(0, NOT_NEGATIVE)
    """Pixels of black border around an image, before a random crop of its old size; 0: no crop."""
    random_hflip: bool = False
    """Mirror each image left to right with probability 0.5."""
    random_erasing: float = setting(0.0, UP_TO_ONE)
    """Probability of blanking one random rectangle (2 to 33 % of the area) of an image."""
    rand_augment: int = setting(0, rule("0 to 20", lambda value: 0 <= value <= 20))
    """Number of RandAugment operations, the same for all images of a global batch; 0: none."""
    color_jitter: float = setting(0.0, UP_TO_ONE)
    """Largest relative change of brightness, contrast, saturation; one draw per global batch."""
    mixup: float = setting(0.0, NOT_NEGATIVE)
    """Alpha of mixup: images are averaged with a weight from Beta(alpha, alpha); 0: no mixup."""
    cutmix: float = setting(0.0, NOT_NEGATIVE)
    """Alpha of CutMix: the kept share of an image is from Beta(alpha, alpha); 0: no CutMix."""

    def check_images(self, channels: int, height: int, width: int) -> None:
        """Check that this augmentation is possible for images of this shape; ConfigError if not."""
        require(
            channels in (1, 3) or not (self.rand_augment or self.color_jitter),
            "data.augment.rand_augment and color_jitter need images of 1 or 3 channels, and these"
            f" have {channels}: set both to 0",
        )
        require(
            self.random_crop_padding < min(height, width),
            f"data.augment.random_crop_padding={self.random_crop_padding} must be smaller than the"
            f" images of {height}×{width} pixels",
        )


@config_class
class FileAugmentConfig(AugmentConfig):
    random_resized_crop: float | None = setting(
        0.25, rule("greater than 0 and at most 1, or null", lambda value: 0 < value <= 1)
    )
    """Smallest share of an image's area in a random crop, aspect 3:4 to 4:3; null: center crop.

    A side of the crop that would be longer than that of the image is shortened.
    """


@config_class
class DataConfig:
    name: str = MISSING
    mean: list[float] = setting([0.5])
    """Mean of the training split per channel, of pixels in [0, 1], for normalization."""
    std: list[float] = setting([0.25])
    """Standard deviation of the training split per channel, of pixels in [0, 1]."""
    validation_fraction: float = setting(0.0, BELOW_ONE)
    """Share, in [0, 1), of the training split to hold out for evaluation; 0: use the test split."""
    fold: int | None = setting(None, NOT_NEGATIVE)
    """Cross-validation: hold out this one of num_folds parts of the training split, from 0."""
    num_folds: int = setting(5, rule("at least 2", lambda value: value >= 2))
    """Number of parts for fold."""
    num_workers: Any = setting(  # omegaconf 2.3 cannot merge int | str inside of a group
        "auto",
        FREE
        | rule(
            "auto or 0 to 1024",
            lambda value: value == "auto" or (type(value) is int and 0 <= value <= 1024),
        ),
    )
    """Threads per rank that read streamed images; auto: usable cores / local ranks, 2 to 16."""
    sampling: Sampling = Sampling.uniform
    """How often an epoch draws a training sample. uniform: once; balanced: each class equally
    often; sqrt: a class in proportion to the square root of its size; weights: by a weight of each
    sample. An epoch has as many draws as there are samples.
    """
    on_bad_image: OnBadImage = setting(OnBadImage.error, FREE)
    """If an image cannot be decoded, error: stop the run; skip: leave out and list the image."""
    augment: AugmentConfig = setting(AugmentConfig())

    def __post_init__(self) -> None:
        with suppress(TypeError):  # `Config` names a value of a wrong type
            require(
                len(self.mean) == len(self.std) > 0,
                f"data.mean={self.mean} and data.std={self.std} must have the same length, not 0:"
                " one value per channel",
            )
            require(
                self.fold is None or self.fold < self.num_folds,
                f"data.fold={self.fold} must be less than data.num_folds={self.num_folds}",
            )
            require(
                self.fold is None or not self.validation_fraction,
                f"data.fold={self.fold} and data.validation_fraction={self.validation_fraction}"
                " exclude each other: both hold out training images",
            )
            require(
                min(self.std) >= 1e-6, f"data.std={self.std} must be at least 1e-6 in every channel"
            )

    @property
    def holds_out(self) -> bool:
        """Whether a part of the training split is held out for evaluation."""
        return bool(self.validation_fraction) or self.fold is not None

    @property
    def hold_out_key(self) -> str:
        """The setting that holds out images, for messages."""
        if self.fold is None:
            return f"data.validation_fraction={self.validation_fraction:g}"
        return f"data.fold={self.fold}"

    @property
    def hold_out_off(self) -> str:
        """The setting with which no images are held out."""
        return "data.validation_fraction=0" if self.fold is None else "data.fold=null"

    @property
    def description(self) -> dict[str, str | None]:
        """Name and root of the data set, for result files; root is None without a folder."""
        return {"name": self.name, "root": getattr(self, "root", None)}
