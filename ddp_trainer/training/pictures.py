"""Pictures for the loggers at the start of a run: the first batch as the model sees it, and the sizes of classes."""

import io
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Subset
from torchvision.utils import make_grid

from ddp_trainer.config.data import DataConfig
from ddp_trainer.data.loaders import Loaders
from ddp_trainer.data.readers import SampleReader
from ddp_trainer.loggers.base import LoggerGroup

logger = logging.getLogger(__name__)

MAX_IMAGES, MAX_CLASSES = 64, 40
ROW, NAMES, BARS, NUMBERS = 16, 180, 300, 60
"""Pixels of the bar chart: height of a row, and widths of its columns."""
BLUE, BLACK, WHITE = (42, 120, 181), (30, 30, 30), (255, 255, 255)


def log_pictures(loggers: LoggerGroup, loaders: Loaders, images: Tensor, *, config: DataConfig) -> None:
    """Record the first `images`, float [B, C, H, W], as ``train/first_batch``, and ``train/class_sizes``, if known."""
    if not loggers.loggers:
        return
    try:
        first = grid_png(images[:MAX_IMAGES].cpu(), mean=config.mean, std=config.std)
        loggers.image("train/first_batch", first, 0)
        labels = labels_of(loaders.train.reader)
        if labels is not None:
            counts = torch.bincount(labels.cpu(), minlength=len(loaders.class_names)).tolist()
            loggers.image("train/class_sizes", bars_png(loaders.class_names, counts), 0)
    except Exception as error:  # labels of a plug-in may be anything, and other ranks are in their first step
        logger.warning("the pictures of the first batch were not recorded: %s: %s", type(error).__name__, error)


def labels_of(source: Any) -> Tensor | None:
    """Return the labels of a reader or a data set, int64 [N]; None if it does not have them as a tensor."""
    if isinstance(source, SampleReader | Subset):
        labels = labels_of(source.dataset)
        return labels if labels is None or isinstance(source, SampleReader) else labels[list(source.indices)]
    labels = getattr(source, "labels", None)
    return labels if isinstance(labels, Tensor) else None


def grid_png(images: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """Return a PNG of `images`, float [B, C, H, W], in a square; of more than three channels the first."""
    pixels = images * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    pixels = pixels if pixels.shape[1] in (1, 3) else pixels[:, :1]
    grid = make_grid(pixels.clamp(0, 1), nrow=math.ceil(math.sqrt(len(images))))
    return png(Image.fromarray(grid.mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()))


def bars_png(names: Sequence[str], counts: Sequence[int]) -> bytes:
    """Return a PNG with a bar for each class, the largest first; of many classes the largest and the smallest."""
    rows = sorted(zip(counts, names, strict=True), reverse=True)
    if len(rows) > MAX_CLASSES:
        rows = [*rows[: MAX_CLASSES // 2], *rows[-MAX_CLASSES // 2 :]]
    image = Image.new("RGB", (NAMES + BARS + NUMBERS, ROW * len(rows) + ROW), WHITE)
    draw = ImageDraw.Draw(image)
    for number, (count, name) in enumerate(rows):
        top = number * ROW + ROW // 2
        text = name if name.isascii() and name.isprintable() else ascii(name)[1:-1]  # the built-in font has no others
        draw.text((8, top + 2), text[:28], fill=BLACK)
        end = NAMES + BARS * count / max(1, rows[0][0])
        draw.rectangle((NAMES, top + 3, end, top + ROW - 3), fill=BLUE)
        draw.text((end + 6, top + 2), f"{count:,}", fill=BLACK)
    return png(image)


def png(image: Image.Image) -> bytes:
    """Return the content of a PNG file with `image`."""
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()
