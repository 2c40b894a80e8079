"""The images on which a trained model is scored."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_trainer.config.data import ImageFolderConfig, SplitName
from ddp_trainer.config.errors import require
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import ImageTensors, Split, num_samples
from ddp_trainer.data.datasets.image_folder import open_folder
from ddp_trainer.data.loaders import num_readers
from ddp_trainer.data.readers import NO_LABEL, SampleReader
from ddp_trainer.tools.trained_model import TrainedModel


@dataclass(frozen=True, slots=True)
class NamedSplit:
    """A split, its name, the digest of its data set, and whether the data set has changed."""

    name: str
    images: Split
    fingerprint: str
    """A digest of the whole data set to which the split belongs."""
    is_changed: bool = False
    """Whether the data set has changed since the training."""


def choose_split(
    trained: TrainedModel, name: SplitName | None = None, *, is_other_folder: bool = False
) -> NamedSplit:
    """Return a split of the run's data set; name None: the split on which the training evaluated.

    is_other_folder: the user has set data.root; if it is a folder of images (data=imagefolder),
    name=test is its subfolder test, valid, validation or val, or else data.root itself, with one
    subfolder per class.

    Raises:
        ConfigError: there is no such split, or its classes or the shape of its images are not those
        of the model.
    """
    config = trained.config.data
    name = name or SplitName[config.eval_split]
    require(
        name is not SplitName.validation or config.validation_fraction > 0,
        f"split=validation does not exist: {trained.run_dir} held out no images; choose test or"
        " train",
    )
    is_test = name is SplitName.test
    if is_other_folder and isinstance(config, ImageFolderConfig) and is_test:
        images = open_folder(config, trained.class_names)
        return NamedSplit(name.name, images, images.fingerprint())
    needed = replace(config, validation_fraction=0.0) if is_test else config
    datasets = build_datasets(needed)
    check_fit(trained, list(datasets.class_names), datasets.image_shape)
    is_changed = needed == config and datasets.fingerprint != trained.data_fingerprint
    images = datasets.train if name is SplitName.train else datasets.eval
    return NamedSplit(name.name, images, datasets.fingerprint, is_changed)


def check_fit(trained: TrainedModel, names: list[str], shape: tuple[int, int, int]) -> None:
    """Raise ConfigError if class names or the shape of images are not those of the model."""
    data = f"data={trained.config.data.name}"
    known = trained.class_names
    require(
        names == known,
        f"{data} has other classes than the model: {', '.join(names[:5])} … in place of"
        f" {', '.join(known[:5])} …",
    )
    expected = tuple(trained.preprocessing.image_shape)
    require(
        shape == expected,
        f"{data} has images of the shape {shape} and the model expects {expected}",
    )


def example_images(trained: TrainedModel, count: int) -> Tensor:
    """Return up to `count` evenly spaced images of the evaluation split: uint8 [N, C, H, W]."""
    channels, height, width = trained.preprocessing.image_shape
    if not count:
        return torch.empty(0, channels, height, width, dtype=torch.uint8)
    images = choose_split(trained).images
    size = num_samples(images)
    ids = torch.linspace(0, size - 1, min(count, size)).long()
    if isinstance(images, ImageTensors):
        return images.images[ids]
    reader = SampleReader(
        images,
        image_shape=(channels, height, width),
        num_classes=len(trained.class_names),
        num_workers=num_readers(trained.config.data.num_workers, local_world_size=1),
    )
    return torch.cat([pixels[labels != NO_LABEL] for pixels, labels in reader.read(ids.split(64))])
