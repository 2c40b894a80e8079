"""The group ``data``: the data sets."""

from enum import StrEnum
from typing import Any

from ddp_trainer.config.errors import FREE, POSITIVE, config_class, rule, setting
from ddp_trainer.config.images import AugmentConfig, DataConfig, FileAugmentConfig
from ddp_trainer.registry import register_dataset

Cache = StrEnum("Cache", ["none", "uint8"])
SplitName = StrEnum("SplitName", ["test", "validation", "train"])


@config_class
class DigitsConfig(DataConfig):
    name: str = "digits"
    mean: list[float] = setting([0.2872])
    std: list[float] = setting([0.3540])
    augment: AugmentConfig = setting(AugmentConfig(random_crop_padding=1))


@config_class
class FashionMnistConfig(DataConfig):
    name: str = "fashion_mnist"
    root: str | None = setting(None, FREE)
    """Folder with the four IDX files; null: the folder of Debian's package, or else a download."""
    mean: list[float] = setting([0.2860])
    std: list[float] = setting([0.3530])
    augment: AugmentConfig = setting(AugmentConfig(random_hflip=True))


@config_class
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


@config_class
class ImageFilesConfig(DataConfig):
    """The keys of data sets whose images are files."""

    root: str | None = setting(None, FREE)
    """Folder with train/<class> and val/<class>, or with validation_fraction just <class>."""
    image_size: int = setting(224, POSITIVE)
    """Height and width, in pixels, to which image crops are scaled."""
    channels: int = setting(3, POSITIVE)
    """Channels of an image; mean and std must have as many values, or one. 3: RGB; 1: gray; more:
    files of numpy.save, or TIFF files with a page for each channel.
    """
    cache: Cache = Cache.none
    """uint8: before training, decode all images, scale them down until their shorter side is 8/7 of
    image_size, and write them to files; none: decode an image each time it is read.
    """
    cache_dir: str | None = setting(None, FREE)
    """Folder of the cache and of the list of files, on this node; null: ~/.cache/ddp_trainer."""
    mean: list[float] = setting([0.485, 0.456, 0.406])
    """Mean of the training split per channel, of pixels in [0, 1]; the default is ImageNet's."""
    std: list[float] = setting([0.229, 0.224, 0.225])
    """Standard deviation of the training split per channel; the default is ImageNet's."""
    augment: FileAugmentConfig = setting(FileAugmentConfig(random_hflip=True))  # type: ignore[override]


@config_class
class ImageFolderConfig(ImageFilesConfig):
    name: str = "imagefolder"


@config_class
class ManifestConfig(ImageFilesConfig):
    name: str = "manifest"
    file: str | None = setting(None, FREE)
    """Table of the images: .csv, .tsv, .jsonl (an object in each line) or .parquet."""
    root: str | None = setting(None, FREE)
    """Folder to which the paths in the table belong; null: the folder of the table."""
    path_column: str = "path"
    """Name of the column with the path of each image."""
    label_column: str = "label"
    """Name of the column with the class of each image."""
    split_column: str | None = "split"
    """Column with train, validation or test; without it, set validation_fraction; null: none."""
    group_column: str | None = "group"
    """Column with the group of each image, for example its patient. A group is in one split only;
    null, or no such column: no groups.
    """
    weight_column: str | None = "weight"
    """Column with the weight of each image for data.sampling=weights; null: none."""
    class_names: list[str] | None = None
    """Names of the classes, in the order of their numbers; null: sorted."""

    @property
    def description(self) -> dict[str, str | None]:
        return {"name": self.name, "root": self.root, "file": self.file}


@config_class
class TorchvisionDataConfig(ImageFilesConfig):
    name: str = "torchvision"
    dataset: str = "CIFAR10"
    """Name of a class of torchvision.datasets."""
    root: str | None = setting(None, FREE)
    """Folder in the layout that the class expects; null: ~/.cache/ddp_trainer/torchvision."""
    download: bool = setting(False, FREE)
    """Download missing files; one process per node downloads at a time."""
    train_split: str | None = None
    """Argument `split` of torchvision's class for training; null: the default of the class."""
    test_split: str | None = None
    """Argument `split` for evaluation; null: the first of test, val and valid that exists."""
    arguments: dict[str, Any] = setting({})
    """Other arguments of the class; for example EMNIST needs +data.arguments.split=letters."""
    mean: list[float] = setting([0.5])
    """Mean per channel, of pixels scaled to [0, 1]; one value applies to all channels."""
    std: list[float] = setting([0.25])
    """Standard deviation per channel; one value applies to all channels."""


@config_class
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
register_dataset(
    "manifest", ManifestConfig, builder="ddp_trainer.data.datasets.manifest:build_manifest"
)
for name, schema in (("torchvision", TorchvisionDataConfig), ("cifar10", Cifar10Config)):
    register_dataset(
        name, schema, builder="ddp_trainer.data.datasets.torchvision_sets:build_torchvision_set"
    )
