"""The lines that a launch logs at its start, and after it has resumed with other settings."""

import logging
import platform
from collections.abc import Callable
from typing import Any

import torch

from ddp_trainer.checkpoint.file import State
from ddp_trainer.config.differences import differences, flatten_keys
from ddp_trainer.config.errors import printable
from ddp_trainer.config.schema import Precision
from ddp_trainer.data.dataset import num_samples
from ddp_trainer.optim.interfaces import Factor
from ddp_trainer.training.run import TrainingRun

logger = logging.getLogger(__name__)

MAX_NAMES = 10
"""The largest number of classes that the log lists."""


def log_header(training: TrainingRun) -> None:
    """Log the model, the data, the devices, the batch sizes and the run directory."""
    config = training.config
    datasets = training.loaders.datasets
    world = training.world
    sampler = training.loaders.sampler
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else platform.processor()
    )
    split = datasets.eval_split
    logger.info(
        "%s (%s parameters) on %s: %d training, %d %s images",
        config.model.name,
        f"{training.train_step.num_parameters:,}",
        config.data.name,
        num_samples(datasets.train),
        num_samples(datasets.eval),
        split,
    )
    names = list(map(printable, datasets.class_names[:MAX_NAMES]))
    more = len(datasets.class_names) - len(names)
    logger.info(
        "%d classes: %s%s",
        len(datasets.class_names),
        ", ".join(names),
        f" and {more} more" if more else "",
    )
    logger.info(
        "%d × %s (%s), %s, num_threads=%d, sync=%s, torch %s",
        world.world_size,
        device or world.device.type,
        world.backend,
        config.precision.name,
        world.num_threads,
        config.sync.name,
        torch.__version__,
    )
    logger.info(
        "global batch %d on %d ranks, at most %d images at a time × %d gradient accumulation steps,"
        " %d steps an epoch, %d epochs, lr %g",
        config.global_batch_size,
        world.world_size,
        -(-sampler.local_batch_size // config.gradient_accumulation_steps),
        config.gradient_accumulation_steps,
        sampler.steps_per_epoch,
        config.epochs,
        config.optimizer.scaled_lr(config.global_batch_size),
    )
    if sampler.draw is not None:
        drawn = sampler.draw.classes[sampler.order()]
        counts = torch.bincount(drawn, minlength=len(datasets.class_names)).tolist()
        sizes = torch.bincount(sampler.draw.classes, minlength=len(counts)).tolist()
        parts = zip(names, counts, sizes, strict=False)
        logger.info(
            "data.sampling=%s: an epoch draws %s",
            config.data.sampling.name,
            ", ".join(f"{name} {count} times of {size} images" for name, count, size in parts),
        )
    if config.precision is Precision.fp16 and world.device.type == "cpu":
        logger.warning(
            "precision=fp16 takes many times as long as fp32 on a CPU: use precision=fp32"
        )
    warmup = config.scheduler.warmup_epochs
    if warmup > config.epochs:
        logger.warning(
            "scheduler.warmup_epochs=%g is more than epochs=%d: the warm-up takes half of the"
            " training",
            warmup,
            config.epochs,
        )
    if config.checkpoint.keep_best and split == "test":
        logger.info(
            "best.pt is chosen on the test split: set data.validation_fraction=0.1 to hold out"
            " images for it"
        )
    logger.info("run directory %s", training.run_dir)


def log_changes(
    state: State, new: dict[str, Any], *, peak_lr: float, lr_factor: Callable[[int], Factor]
) -> None:
    """Log the keys whose values differ from those in the checkpoint, and the next learning rate.

    new: the config as nested dicts. peak_lr: that of the schedule; lr_factor: returns the schedule
    of a training of so many epochs.
    """
    old = state["config"]
    changes = differences(flatten_keys(old), flatten_keys(new), ignore=["resume"])
    if changes:
        logger.info("changed since the checkpoint: %s", "; ".join(changes))
    if old["epochs"] == new["epochs"]:
        return
    step = state["step"]
    logger.warning(
        "the schedule is now for %d epochs, not %d: the learning rate of the last step was %.3g,"
        " and that of the next step is %.3g",
        new["epochs"],
        old["epochs"],
        peak_lr * lr_factor(old["epochs"])(max(0, step - 1)),
        peak_lr * lr_factor(new["epochs"])(step),
    )
