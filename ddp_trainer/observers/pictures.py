"""Pictures for the loggers: the first batch, class sizes, confusion matrix and worst mistakes."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.utils import make_grid

from ddp_trainer.data.dataset import class_counts
from ddp_trainer.data.readers import read_images
from ddp_trainer.observers.loggers.base import Loggers
from ddp_trainer.scores.pictures import (
    BLACK,
    BLUE,
    WHITE,
    captioned_png,
    confusion_png,
    png,
    short_ascii,
)
from ddp_trainer.scores.scores import Scores, ids_of
from ddp_trainer.training.evaluation import LABEL, PREDICTION
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)

MAX_IMAGES = 64
MAX_CLASSES = 40
MAX_MISTAKES = 32
ROW = 16
NAMES = 180
BARS = 300
NUMBERS = 60
"""Pixels of the bar chart: height of a row, and widths of its columns."""


class Pictures(Observer):
    """Records the first batch and the class sizes, then confusion matrices and mistakes."""

    def __init__(self, loggers: Loggers) -> None:
        self.loggers = loggers

    def on_epoch(self, run: TrainingRun) -> None:
        if run.step == 0 and self.loggers.loggers:
            self.record("first batch", partial(self.first_batch, run))

    def on_evaluation(self, run: TrainingRun) -> None:
        # After epochs 1, 2, 4, 8 and so on: a long run gets few of these large pictures.
        is_power_of_two = (run.epoch + 1) & run.epoch == 0
        is_wanted = bool(run.config.logger) and (is_power_of_two or run.step >= run.last_step)
        if is_wanted and run.results is not None:
            rows = run.results.gather(run.world)
            if self.loggers.loggers and len(rows):
                self.record("evaluation", partial(self.scores, run, rows))

    def record(self, name: str, function: Callable[[], None]) -> None:
        """Call `function`; a failure logs a warning with `name`.

        The reader or the labels of a plug-in may raise anything, and an error on one rank would
        hang the others.
        """
        try:
            function()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("the pictures of the %s were not recorded: %s", name, reason)

    def first_batch(self, run: TrainingRun) -> None:
        """Record ``train/first_batch``, as the model sees it, and ``train/class_sizes`` if known.

        Both are also written to pictures/ in the run directory.
        """
        loaders = run.loaders
        images = next(iter(loaders.train)).images[:MAX_IMAGES].cpu()
        mean = loaders.preprocessing["mean"]
        std = loaders.preprocessing["std"]
        pictures = {"first_batch": grid_png(images, mean=mean, std=std)}
        names = loaders.datasets.class_names
        counts = class_counts(loaders.datasets.train, len(names))
        if counts is not None:
            pictures["class_sizes"] = bars_png(names, counts.tolist())
        folder = run.run_dir / "pictures"
        folder.mkdir(exist_ok=True)
        for name, content in pictures.items():
            self.loggers.call("image", f"train/{name}", content, 0)
            (folder / f"{name}.png").write_bytes(content)

    def scores(self, run: TrainingRun, rows: Tensor) -> None:
        """Record ``eval/confusion_matrix``, and in ``eval/mistakes`` those with the largest losses.

        rows: the result of `SampleResults.gather`, float64 [N, 6].
        """
        names = run.loaders.datasets.class_names
        scores = Scores(rows, names)
        confusion = confusion_png(scores.confusion, names)
        self.loggers.call("image", "eval/confusion_matrix", confusion, run.step)
        worst = scores.mistakes()[:MAX_MISTAKES]
        if not len(worst):
            return
        pixels = read_images(run.loaders.eval.reader, ids_of(worst))
        captions = [
            (names[int(row[PREDICTION])], f"is {names[int(row[LABEL])]}") for row in worst.tolist()
        ]
        mistakes = captioned_png(list(pixels.cpu()), captions)
        self.loggers.call("image", "eval/mistakes", mistakes, run.step)


def grid_png(images: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> bytes:
    """Return a PNG grid of normalized `images`, float [B, C, H, W]; for C = 2 or > 3, channel 0."""
    pixels = images * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    pixels = pixels if pixels.shape[1] in (1, 3) else pixels[:, :1]
    grid = make_grid(pixels.clamp(0, 1), nrow=math.ceil(math.sqrt(len(images))))
    return png(Image.fromarray(grid.mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()))


def bars_png(names: Sequence[str], counts: Sequence[int]) -> bytes:
    """Return a PNG with a bar per class, largest first; at most `MAX_CLASSES`, at both ends."""
    rows = sorted(zip(counts, names, strict=True), reverse=True)
    if len(rows) > MAX_CLASSES:
        rows = [*rows[: MAX_CLASSES // 2], *rows[-MAX_CLASSES // 2 :]]
    image = Image.new("RGB", (NAMES + BARS + NUMBERS, ROW * len(rows) + ROW), WHITE)
    draw = ImageDraw.Draw(image)
    for number, (count, name) in enumerate(rows):
        top = number * ROW + ROW // 2
        draw.text((8, top + 2), short_ascii(name, length=28), fill=BLACK)
        end = NAMES + BARS * count / max(1, rows[0][0])
        draw.rectangle((NAMES, top + 3, end, top + ROW - 3), fill=BLUE)
        draw.text((end + 6, top + 2), f"{count:,}", fill=BLACK)
    return png(image)
