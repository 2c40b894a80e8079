"""Pictures for the loggers: the first batch, the confusion matrix and the worst mistakes."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ddp_trainer.config.errors import printable
from ddp_trainer.data.build import class_counts
from ddp_trainer.data.loaders import Batch, read_images
from ddp_trainer.files import own_folder, replace_file
from ddp_trainer.observers.loggers.base import Loggers, one_line
from ddp_trainer.scores.pictures import captioned_png, confusion_png
from ddp_trainer.scores.scores import Scores, ids_of
from ddp_trainer.training.evaluation import LABEL, PREDICTION
from ddp_trainer.training.run import Observer, TrainingRun

logger = logging.getLogger(__name__)

MAX_IMAGES = 64
MAX_MISTAKES = 32


class Pictures(Observer):
    """Sends the loggers the first batch and class sizes, later confusion matrices and mistakes."""

    def __init__(self, loggers: Loggers) -> None:
        self.loggers = loggers
        self.are_recorded = False
        """Whether a logger of rank 0 records the pictures of an evaluation."""

    def on_start(self, run: TrainingRun) -> None:
        self.are_recorded = run.world.broadcast_object(self.loggers.record_images)

    def on_step(self, run: TrainingRun) -> None:
        # Not before the step: to read the batch twice would keep the other ranks waiting.
        if run.step == 1 and self.loggers.loggers:
            with warning_of_failure("first batch"):
                self.first_batch(run)
        run.events.stop_calling("on_step", self)

    def on_evaluation(self, run: TrainingRun) -> None:
        # After epochs 1, 2, 4, 8 and so on: a long run gets few of these large pictures.
        is_power_of_two = (run.epoch + 1) & run.epoch == 0
        is_wanted = self.are_recorded and (is_power_of_two or run.step >= run.last_step)
        if is_wanted and run.results is not None:
            rows = run.results.gather(run.world)
            if run.world.is_main and len(rows):
                with warning_of_failure("evaluation"):
                    self.scores(run, rows)

    def first_batch(self, run: TrainingRun) -> None:
        """Record rank 0's first batch as ``train/first_batch``, and the class sizes if known.

        The picture is also written to pictures/first_batch.png in the run directory.
        """
        assert run.batch is not None
        loaders = run.loaders
        names = loaders.datasets.class_names
        mean = loaders.preprocessing["mean"]
        std = loaders.preprocessing["std"]
        picture = batch_png(run.batch, names, mean=mean, std=std)
        self.loggers.call("image", "train/first_batch", picture, 0)
        with (
            own_folder(run.run_dir / "pictures") as folder,
            replace_file(folder / "first_batch.png") as file,
        ):
            file.write(picture)
        counts = class_counts(loaders.datasets.train, len(names))
        if counts is not None:
            self.loggers.call("text", "class sizes", sizes_text(names, counts.tolist()), 0)

    def scores(self, run: TrainingRun, rows: Tensor) -> None:
        """Record ``eval/confusion_matrix``, and the worst mistakes as ``eval/mistakes``.

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


@contextmanager
def warning_of_failure(name: str) -> Iterator[None]:
    """Turn an exception in the context into a warning that the pictures of `name` are missing.

    A plug-in's data set may raise anything, and an exception on rank 0 alone would let the other
    ranks hang.
    """
    try:
        yield
    except Exception as error:
        logger.warning("the pictures of the %s were not recorded: %s", name, one_line(error))


def batch_png(
    batch: Batch, class_names: Sequence[str], *, mean: Sequence[float], std: Sequence[float]
) -> bytes:
    """Return a PNG of the first `MAX_IMAGES` images of `batch`, each above its class name.

    The normalization by `mean` and `std` is undone. An image that mixes two images gets the class
    with the larger share.
    """
    images = batch.images[:MAX_IMAGES].cpu()
    pixels = images * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
    labels = batch.labels if batch.labels.dim() == 1 else batch.labels.argmax(1)
    names = dict(enumerate(class_names))
    captions = [[names.get(label, "bad sample")] for label in labels[:MAX_IMAGES].tolist()]
    return captioned_png(list(pixels.mul(255).round().clamp(0, 255).to(torch.uint8)), captions)


def sizes_text(class_names: Sequence[str], counts: Sequence[int]) -> str:
    """Return the number of images of each class, the largest first, as Markdown."""
    sizes = sorted(zip(counts, class_names, strict=True), reverse=True)
    return "\n".join(
        ["```text", *(f"{count:>12,}  {printable(name)}" for count, name in sizes), "```"]
    )
