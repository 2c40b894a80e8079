"""The images on which a trained model is scored."""

from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_trainer.config.data import ImageFolderConfig, ManifestConfig, SplitName
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.build import build_datasets, num_readers
from ddp_trainer.data.dataset import ImageTensors, Split, num_samples
from ddp_trainer.data.datasets.image_folder import open_other_folder, open_test_folder
from ddp_trainer.data.datasets.manifest import open_manifest_split
from ddp_trainer.data.readers import NO_LABEL, SampleReader
from ddp_trainer.tools.trained_model import TrainedModel

BATCH_SIZE = 64


class NamedSplit(NamedTuple):
    """A split, its name, and the digest of its data set."""

    name: str
    images: Split
    fingerprint: str
    """A digest of the images, or of the whole data set to which they belong."""
    is_other: bool = False
    """Whether the images are not of the data set with which the model was trained."""


def choose_split(
    trained: TrainedModel, name: SplitName | None = None, *, is_other_folder: bool = False
) -> NamedSplit:
    """Return a split of the run's data set; name None: the split on which the training evaluated.

    is_other_folder: whether the user has set data.root or data.file. With data=imagefolder, the
    split is then that of `open_other_folder`, and with data=manifest that of
    `open_manifest_split`, unless they are a copy of the data of the training, or `name` is train.

    Raises:
        ConfigError: there is no such split, or its classes or the shape of its images are not those
        of the model.
    """
    config = trained.config.data
    wanted = name or trained.eval_split
    is_extra_test = wanted == "test" and trained.eval_split == "validation"
    if isinstance(config, ImageFolderConfig | ManifestConfig) and wanted != "train":
        is_other = is_other_folder and not is_copy(trained)
        if is_other or is_extra_test:
            return open_files(config, wanted, trained.class_names, is_other=is_other)
    require(
        wanted != "validation" or trained.eval_split == "validation",
        f"split=validation does not exist: {trained.run_dir} held out no images; choose test or"
        " train",
    )
    whole = replace(config, validation_fraction=0.0, fold=None)
    datasets = build_datasets(whole if is_extra_test else config)
    check_fit(trained, list(datasets.class_names), datasets.image_shape)
    is_other = not is_extra_test and datasets.fingerprint != trained.data_fingerprint
    images = datasets.train if wanted == "train" else datasets.eval
    return NamedSplit(wanted, images, datasets.fingerprint, is_other)


def open_files(
    config: ImageFolderConfig | ManifestConfig,
    split: str,
    class_names: list[str],
    *,
    is_other: bool,
) -> NamedSplit:
    """Return a split of a folder or a table that the training did not evaluate on.

    is_other: whether it has other images than those of the training.
    """
    if isinstance(config, ManifestConfig):
        images = open_manifest_split(config, split, class_names, may_be_whole=is_other)
    elif is_other:
        split, images = open_other_folder(config, class_names)
    else:
        images = open_test_folder(config, class_names)
    return NamedSplit(split, images, images.fingerprint(), is_other)


def is_copy(trained: TrainedModel) -> bool:
    """Return whether data.root has the same files as the folder of the training."""
    try:
        return build_datasets(trained.config.data).fingerprint == trained.data_fingerprint
    except ConfigError:  # data.root has other folders
        return False


def check_fit(trained: TrainedModel, names: list[str], shape: tuple[int, int, int]) -> None:
    """Raise ConfigError if class names or image shape of a data set are not those of the model."""
    data = f"data={trained.config.data.name}"
    known = trained.class_names
    pairs = zip_longest(names, known)
    here, trained_on = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
    require(
        names == known,
        f"{data} has other classes than the model, such as {here!r} in place of {trained_on!r}:"
        " use data with the same classes",
    )
    expected = trained.preprocessing.image_shape
    require(
        shape == expected,
        f"{data} has images of the shape {shape} and the model expects {expected}",
    )


def example_images(trained: TrainedModel, count: int) -> list[Tensor]:
    """Return up to `count` evenly spaced images of the evaluation split, in batches.

    A batch is uint8 [B, C, H, W]. Images that cannot be read are left out. With count=0, the data
    set is not read.
    """
    if not count:
        return []
    images = choose_split(trained).images
    size = num_samples(images)
    batches = torch.linspace(0, size - 1, min(count, size)).long().split(BATCH_SIZE)
    if isinstance(images, ImageTensors):
        return [images.images[ids] for ids in batches]
    reader = SampleReader(
        images,
        image_shape=trained.preprocessing.image_shape,
        num_classes=len(trained.class_names),
        num_workers=num_readers(trained.config.data.num_workers, local_world_size=1),
    )
    return [pixels[labels != NO_LABEL] for pixels, labels in reader.read(batches)]
