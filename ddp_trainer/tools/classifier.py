"""A classifier of images: ``load(run_dir)(images)``."""

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from torch import Tensor, nn

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.messages import format_config_error
from ddp_trainer.config.schema import Backend
from ddp_trainer.data.augmentation import Normalize
from ddp_trainer.data.dataset import BadImageError, to_tensor
from ddp_trainer.data.images import file_index
from ddp_trainer.data.images.decoding import decode, picture_pixels
from ddp_trainer.distributed.environment import Environment
from ddp_trainer.distributed.process_group import choose_device
from ddp_trainer.start import autocast_dtype, memory_format
from ddp_trainer.tools.report.page import build_page
from ddp_trainer.tools.report.runs import Run
from ddp_trainer.tools.trained_model import BEST, TrainedModel, load_model

Picture = str | Path | Image.Image | np.ndarray[Any, Any] | Tensor
"""A path, a PIL image, a NumPy array uint8 [H, W] or [H, W, C], or a tensor uint8 [C, H, W]."""
BATCH_SIZE = 64


class Prediction(NamedTuple):
    """The prediction for one image."""

    label: str
    probability: float
    """The probability of `label`, in [0, 1]."""
    top: list[tuple[str, float]]
    """The most probable classes with their probabilities; the first is `label`."""


class Classifier:
    """A trained model with its classes and its preprocessing. It is not thread-safe."""

    def __init__(self, trained: TrainedModel, device: torch.device | None = None) -> None:
        """device: None for the device of the config; ConfigError if this machine lacks it."""
        config = trained.config
        self.check_finite = trained.check_finite
        self.run_dir = trained.run_dir
        self.class_names = trained.class_names
        self.preprocessing = trained.preprocessing
        self.device = device or choose_device(config.device, Backend.auto, Environment())[0]
        self.autocast_dtype = autocast_dtype(config.precision)
        layout = memory_format(config.channels_last)
        self.model: nn.Module = trained.model.to(self.device).to(memory_format=layout)
        self.normalize = Normalize(
            self.preprocessing.mean,
            self.preprocessing.std,
            device=self.device,
            memory_format=layout,
        )

    def __call__(self, images: Picture | Sequence[Picture], *, top: int = 5) -> list[Prediction]:
        """Return a `Prediction` for each image, with the `top` most probable classes.

        Raises:
            BadImageError: a file cannot be read or decoded, or a PIL image converted.
            ValueError: pixels have a wrong dtype or shape.
        """
        return list(self.predictions(self.probabilities(images), top=top))

    def probabilities(self, images: Picture | Sequence[Picture]) -> Tensor:
        """Return the probabilities, float32 [N, classes] on the CPU. Raises: see `__call__`."""
        is_single = isinstance(images, str | Path | Image.Image) or getattr(images, "ndim", 0) in (
            2,
            3,
        )
        sequence: Any = [images] if is_single else images
        parts = [torch.empty(0, len(self.class_names))]
        for start in range(0, len(sequence), BATCH_SIZE):
            batch = sequence[start : start + BATCH_SIZE]
            channels = self.preprocessing.image_shape[0]
            prepared = [self.preprocessing.prepare(pixels_of(image, channels)) for image in batch]
            parts.append(self.of_pixels(torch.stack(prepared)))
        return torch.cat(parts)

    @torch.inference_mode()
    def of_pixels(self, pixels: Tensor) -> Tensor:
        """Return the probabilities, float32 [B, classes] on the CPU; ConfigError if one is NaN.

        pixels: preprocessed images, uint8 [B, C, H, W].
        """
        with torch.autocast(
            self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None
        ):
            logits = self.model(self.normalize(pixels.to(self.device)))
        probabilities = logits.float().softmax(1).cpu()
        self.check_finite(probabilities)
        return probabilities

    def predictions(self, probabilities: Tensor, *, top: int = 5) -> Iterator[Prediction]:
        """Yield a `Prediction` for each row of `probabilities`, float32 [N, classes]."""
        values, classes = probabilities.topk(min(top, len(self.class_names)))
        for row, numbers in zip(values.tolist(), classes.tolist(), strict=True):
            names = [self.class_names[number] for number in numbers]
            pairs = list(zip(names, row, strict=True))
            yield Prediction(*pairs[0], pairs)

    def _repr_html_(self) -> str:
        """Return the report of the run, which a notebook shows, in a frame of its own."""
        page = escape(build_page([Run(self.run_dir)]))
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{page}" width="100%" height="700"></iframe>'
        )


def load(run_dir: str | Path, *, checkpoint: str | int = BEST, device: str = "auto") -> Classifier:
    """Return the classifier that was trained in `run_dir`.

    checkpoint: best, last, or a step; device: auto, cpu or cuda.

    Raises:
        ConfigError: the checkpoint does not exist, is damaged or of another version, or the machine
        lacks the device.
    """
    try:
        path = Path(os.path.expanduser(run_dir))
        return Classifier(load_model(path, str(checkpoint), [f"device={device}"]))
    except OmegaConfBaseException as error:
        raise ConfigError(format_config_error(error, [f"device={device}"])) from error


def pixels_of(image: Picture, channels: int) -> Tensor:
    """Return the pixels of a picture: uint8 [C, H, W].

    channels: those of the model, for files and PIL images.

    Raises:
        BadImageError: the file cannot be read or decoded, or the PIL image converted.
        ValueError: pixels have a wrong dtype or shape.
    """
    if isinstance(image, str | Path):
        try:
            return read_file(Path(image), channels)
        except BadImageError as error:
            raise BadImageError(f"{image}: {error}") from error
    if isinstance(image, Image.Image):
        return picture_pixels(image, channels)
    if not isinstance(image, Tensor):
        image = to_tensor(image)
    if image.dtype != torch.uint8 or image.ndim != 3:
        raise ValueError(
            "pixels must be uint8 [H, W], [H, W, C] or, as a tensor, [C, H, W]; these are"
            f" {image.dtype} {list(image.shape)}"
        )
    return image


def read_file(path: Path, channels: int = 3) -> Tensor:
    """Return an image file, uint8 [channels, H, W]; BadImageError if it cannot be read."""
    try:
        return decode(file_index.read_file(path), channels)
    except OSError as error:
        raise BadImageError(error.strerror or str(error)) from error
