"""Predictions for image files, which threads read in advance."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.config.errors import path_error, require
from ddp_trainer.cores import usable_cores
from ddp_trainer.data.build import num_readers
from ddp_trainer.data.dataset import BadImageError
from ddp_trainer.data.images.file_index import (
    IMAGE_FILES,
    path_errors,
    walk,
    warn_of_broken_links,
)
from ddp_trainer.data.readers import NO_LABEL, SampleReader
from ddp_trainer.runtime import keep_freed_memory
from ddp_trainer.tools.classifier import Classifier, Prediction, read_file
from ddp_trainer.tools.preprocessing import Preprocessing
from ddp_trainer.tools.trained_model import TrainedModel


class PictureFiles(Dataset[tuple[Tensor, int]]):
    """A data set of image files. An item is a preprocessed image, uint8 [C, H, W], and label 0."""

    def __init__(self, paths: Sequence[str], preprocessing: Preprocessing) -> None:
        self.paths = paths
        self.preprocessing = preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = read_file(Path(self.paths[index]), self.preprocessing.image_shape[0])
        try:
            return self.preprocessing.prepare(image), 0
        except ValueError as error:
            raise BadImageError(str(error)) from error

    def path(self, index: int) -> str:
        """Return the path of the file with this index."""
        return self.paths[index]


def predict_files(
    trained: TrainedModel, classifier: Classifier, paths: list[str], *, batch_size: int, top: int
) -> Iterator[tuple[str, Prediction | str]]:
    """Yield each path, in order, with its `Prediction` or the reason why it cannot be read."""
    threads = trained.config.num_threads
    torch.set_num_threads(threads if isinstance(threads, int) else usable_cores())
    keep_freed_memory()
    reader = SampleReader(
        PictureFiles(paths, trained.preprocessing),
        image_shape=trained.preprocessing.image_shape,
        num_classes=1,
        num_workers=num_readers(trained.config.data.num_workers, local_world_size=1),
        pin_memory=classifier.device.type == "cuda",
    )
    parts = torch.arange(len(paths)).split(batch_size) if paths else ()
    for ids, (pixels, labels) in zip(parts, reader.read(parts), strict=True):
        predictions = classifier.predictions(classifier.of_pixels(pixels), top=top)
        for index, label, prediction in zip(ids, labels, predictions, strict=True):
            path = paths[index]
            yield path, prediction if label != NO_LABEL else dict(reader.bad)[path]


def find_pictures(words: Iterable[str], standard_input: Iterable[bytes]) -> list[str]:
    """Return the image files that `words` name: files, folders of images, or - for paths on stdin.

    Raises:
        ConfigError: a word names no file or folder that can be read, or a folder has no image.
        TransientError: the file system does not answer.
    """
    paths: list[str] = []
    for word in map(os.path.expanduser, words):
        if word == "-":
            text = b"".join(standard_input)
            separator = b"\0" if b"\0" in text else b"\n"  # NUL is from find -print0
            paths += [os.fsdecode(line) for line in text.split(separator) if line]
        elif os.path.isdir(word):
            paths += pictures_in(word)
        else:
            try:
                os.stat(word)
            except OSError as error:
                fix = "give image files (quote spaces), a folder, or - for paths on stdin"
                message = f"{word} cannot be read ({error.strerror}): {fix}"
                raise path_error(error, message) from error
            paths.append(word)
    return paths


def pictures_in(folder: str) -> list[str]:
    """Return the sorted paths of the images in a folder and its subfolders.

    Raises:
        ConfigError: there is no image.
    """
    broken_links: list[bytes] = []
    with path_errors():
        files = walk(os.fsencode(folder), b"", [], broken_links, set())
        names = sorted(name for name, _, _ in files)
    warn_of_broken_links(folder, sorted(broken_links))
    require(bool(names), f"{folder} has no image; images are {IMAGE_FILES}")
    return [os.path.join(folder, os.fsdecode(name)) for name in names]
