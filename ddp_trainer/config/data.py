"""The group ``data``."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from ddp_trainer.config.errors import (
    BELOW_ONE,
    FREE,
    NOT_NEGATIVE,
    POSITIVE,
    UP_TO_ONE,
    check_values,
    require,
    rule,
    setting,
)
from ddp_trainer.registry import register_dataset

OnBadImage = StrEnum("OnBadImage", ["error", "skip"])
Cache = StrEnum("Cache", ["none", "uint8"])
SplitName = StrEnum("SplitName", ["test", "validation", "train"])


@dataclass(kw_only=True, slots=True)
class AugmentConfig:
    random_crop_padding: int = setting(0, NOT_NEGATIVE)
    """Width, in pixels, of the black border from which random crops are cut; 0: no crop."""
    random_hflip: bool = False
    """Mirror each image left to right with probability 0.5."""
    random_erasing: float = setting(0.0, UP_TO_ONE)
    """Probability of blanking one random rectangle (2 to 33 % of the area) of an image."""
    rand_augment: int = setting(0, rule("0 to 20", lambda value: 0 <= value <= 20))
    """Number of RandAugment operations, the same for all images of a global batch; 0: none."""
    color_jitter: float = setting(0.0, UP_TO_ONE)
    """Largest relative change of brightness, contrast and saturation, one for a global batch."""
    mixup: float = setting(0.0, NOT_NEGATIVE)
    """Alpha of mixup: an image's weight in a mix is drawn from Beta(alpha, alpha); 0: none."""
    cutmix: float = setting(0.0, NOT_NEGATIVE)
    """Alpha of CutMix: an image keeps a share, from Beta(alpha, alpha), of its area; 0: none."""

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


@dataclass(kw_only=True, slots=True)
class FileAugmentConfig(AugmentConfig):
    random_resized_crop: float | None = setting(
        0.25, rule("greater than 0 and at most 1, or null", lambda value: 0 < value <= 1)
    )
    """Smallest share of a random training crop, of aspect 3:4 to 4:3; null: a center crop."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    name: str = MISSING
    mean: list[float] = setting([0.5])
    """Mean of the training split per channel, on pixels in [0, 1]; used after augmentation."""
    std: list[float] = setting([0.25])
    """Standard deviation of the training split per channel, on pixels in [0, 1]."""
    validation_fraction: float = setting(0.0, BELOW_ONE)
    """Share, in [0, 1), of the training split that is evaluated in place of the test split."""
    num_workers: Any = setting(  # int | str, which omegaconf 2.3 cannot merge inside of a group
        "auto",
        FREE
        | rule(
            "auto or 0 to 1024",
            lambda value: value == "auto" or (type(value) is int and 0 <= value <= 1024),
        ),
    )
    """Threads per rank that read streamed images; auto: usable cores / local ranks, 2 to 16."""
    on_bad_image: OnBadImage = setting(OnBadImage.error, FREE)
    """For an image that cannot be decoded: error: stop; skip: leave it out, and list it."""
    augment: AugmentConfig = setting(AugmentConfig())

    def __post_init__(self) -> None:
        check_values(self, "data.")
        require(
            len(self.mean) == len(self.std) > 0,
            f"data.mean={self.mean} and data.std={self.std} must have the same length, not 0: one"
            " value per channel",
        )
        require(
            all(s >= 1e-6 for s in self.std),
            f"data.std={self.std} must be at least 1e-6 in every channel",
        )

    @property
    def description(self) -> dict[str, str | None]:
        """Name and root of the data set, for result files; root is None without a folder."""
        return {"name": self.name, "root": getattr(self, "root", None)}

    @property
    def eval_split(self) -> str:
        """The name of the split to evaluate: "validation" with validation_fraction, or "test"."""
        return "validation" if self.validation_fraction else "test"


@dataclass(kw_only=True, slots=True)
class DigitsConfig(DataConfig):
    name: str = "digits"
    mean: list[float] = setting([0.2872])
    std: list[float] = setting([0.3540])
    augment: AugmentConfig = setting(AugmentConfig(random_crop_padding=1))


@dataclass(kw_only=True, slots=True)
class FashionMnistConfig(DataConfig):
    name: str = "fashion_mnist"
    root: str | None = setting(None, FREE)
    """Folder with the four IDX files; null: that of Debian's package, or else a download."""
    mean: list[float] = setting([0.2860])
    std: list[float] = setting([0.3530])
    augment: AugmentConfig = setting(AugmentConfig(random_hflip=True))


@dataclass(kw_only=True, slots=True)
class SyntheticConfig(DataConfig):
    name: str = "synthetic"
    mean: list[float] = setting([0.5, 0.5, 0.5])
    std: list[float] = setting([0.25, 0.25, 0.25])
    num_train: int = setting(4096, POSITIVE)
    """Number of training images."""
    num_eval: int = setting(512, POSITIVE)
    """Number of evaluation images."""
    channels: int = setting(3, POSITIVE)
    """Number of channels; mean and std must have as many values."""
    height: int = setting(32, POSITIVE)
    """Height of the images in pixels."""
    width: int = setting(32, POSITIVE)
    """Width of the images in pixels."""
    num_classes: int = setting(10, rule("2 to 256", lambda value: 2 <= value <= 256))
    """Number of classes, 2 to 256."""
    seed: int = 0
    """Seed of the random images."""


@dataclass(kw_only=True, slots=True)
class ImageFilesConfig(DataConfig):
    """The keys of data sets whose images are files."""

    root: str | None = setting(None, FREE)
    """Folder of train/<class> and val/<class>; with validation_fraction, <class> is enough."""
    image_size: int = setting(224, POSITIVE)
    """Height and width, in pixels, to which image crops are scaled."""
    cache: Cache = Cache.none
    """uint8: before training, write all images, scaled down to 8/7 of image_size, to a file."""
    cache_dir: str | None = setting(None, FREE)
    """Folder of the cache and of the list of files, on this node; null: ~/.cache/ddp_trainer."""
    mean: list[float] = setting([0.485, 0.456, 0.406])
    """Mean of the training split per channel, on pixels in [0, 1]; by default ImageNet's."""
    std: list[float] = setting([0.229, 0.224, 0.225])
    """Standard deviation of the training split per channel; the default is that of ImageNet."""
    augment: FileAugmentConfig = setting(FileAugmentConfig(random_hflip=True))  # type: ignore[override]


@dataclass(kw_only=True, slots=True)
class ImageFolderConfig(ImageFilesConfig):
    name: str = "imagefolder"


@dataclass(kw_only=True, slots=True)
class TorchvisionDataConfig(ImageFilesConfig):
    name: str = "torchvision"
    dataset: str = "CIFAR10"
    """Name of a class of torchvision.datasets."""
    root: str | None = setting(None, FREE)
    """Folder in the layout of that class; null: ~/.cache/ddp_trainer/torchvision."""
    download: bool = setting(False, FREE)
    """Download what is missing; one process per node downloads at a time."""
    train_split: str | None = None
    """Argument `split` of torchvision's class for training; null: the default of the class."""
    test_split: str | None = None
    """Argument `split` for evaluation; null: the first of test, val and valid that exists."""
    arguments: dict[str, Any] = setting({})
    """Other arguments of the class; for example EMNIST needs +data.arguments.split=letters."""
    mean: list[float] = setting([0.5])
    """Mean per channel, on pixels scaled to [0, 1]; one value applies to all channels."""
    std: list[float] = setting([0.25])
    """Standard deviation per channel; one value applies to all channels."""


@dataclass(kw_only=True, slots=True)
class Cifar10Config(TorchvisionDataConfig):
    name: str = "cifar10"
    mean: list[float] = setting([0.4914, 0.4822, 0.4465])
    std: list[float] = setting([0.2470, 0.2435, 0.2616])
    augment: FileAugmentConfig = setting(
        FileAugmentConfig(random_crop_padding=4, random_hflip=True)
    )


register_dataset("digits", DigitsConfig, builder="ddp_trainer.data.datasets.digits:build_digits")
register_dataset(
    "fashion_mnist",
    FashionMnistConfig,
    builder="ddp_trainer.data.datasets.fashion_mnist:build_fashion_mnist",
)
register_dataset(
    "synthetic", SyntheticConfig, builder="ddp_trainer.data.datasets.synthetic:build_synthetic"
)
register_dataset(
    "imagefolder",
    ImageFolderConfig,
    builder="ddp_trainer.data.datasets.image_folder:build_image_folder",
)
for name, schema in (("torchvision", TorchvisionDataConfig), ("cifar10", Cifar10Config)):
    register_dataset(
        name, schema, builder="ddp_trainer.data.datasets.torchvision_sets:build_torchvision_set"
    )
