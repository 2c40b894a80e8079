"""Builds and checks data sets, and builds their loaders."""

from collections import Counter
from collections.abc import Sequence, Sized
from functools import partial

import torch
from torch import Tensor

from ddp_trainer import registry
from ddp_trainer.config.errors import ConfigError, one_line, require
from ddp_trainer.config.images import DataConfig
from ddp_trainer.cores import usable_cores
from ddp_trainer.data.augmentation import Augmentation, Normalize
from ddp_trainer.data.dataset import (
    Datasets,
    ImageTensors,
    Shape,
    Split,
    member,
    per_sample,
    shape_of,
)
from ddp_trainer.data.held_out import hold_out
from ddp_trainer.data.loaders import (
    EvaluationLoader,
    Loaders,
    Reader,
    ResidentReader,
    TrainLoader,
)
from ddp_trainer.data.readers import SampleReader
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.data.sampling import build_draw
from ddp_trainer.distributed.world import World


def build_datasets(config: DataConfig) -> Datasets:
    """Return the data set that `config` chooses, with a validation split if `config` asks for one.

    Raises ConfigError if a file is missing or damaged, the images do not fit `config`, or the data
    set does not fit into the memory of the host.
    """
    try:
        datasets = registry.build("data", config, returns=Datasets)
        check(datasets, config)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ConfigError(
            f"data={config.name} does not fit into the memory of this host: use a larger host"
        ) from error

    return hold_out(datasets, config) if config.holds_out else datasets


def check(datasets: Datasets, config: DataConfig) -> None:
    """Check that both splits are valid and that their images fit `config`; ConfigError if not."""
    names = datasets.class_names
    require(
        isinstance(names, Sequence) and all(isinstance(name, str) for name in names),
        f"data={config.name}: class_names must be a sequence of texts and is {one_line(names)}",
    )
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    require(not repeated, f"data={config.name}: class_names has a name twice: {one_line(repeated)}")
    num_classes = len(names)
    try:
        check_split(datasets.train, "train", num_classes=num_classes)
        check_split(datasets.eval, "eval", num_classes=num_classes)
        shape = shape_of(datasets.eval)
        if shape != datasets.image_shape:
            raise ValueError(
                f"images must have one shape: train has {datasets.image_shape} and eval {shape}"
            )
    except (RuntimeError, TypeError, ValueError) as error:  # TypeError: a length that is no int
        root = config.description["root"]
        name = f"data={config.name}" if root is None else f"data={config.name} data.root={root}"
        raise ConfigError(f"{name}: {error}") from error

    channels, height, width = datasets.image_shape
    require(
        len(config.mean) in (1, channels),
        f"data.mean={config.mean} and data.std must each have one value per channel, or one value"
        f" for all: the number of channels of data={config.name} is {channels}",
    )
    config.augment.check_images(channels, height, width)


def check_split(split: Split, name: str, *, num_classes: int) -> None:
    """Check the length, and the images, labels and groups that are tensors; ValueError if wrong."""
    if not isinstance(split, Sized):
        raise ValueError(f"{name} has no length: it must be ImageTensors or a map-style data set")
    if len(split) == 0:
        raise ValueError(f"{name} has no sample")

    crop = member(split, "center_crop")
    if crop not in (None, "stretch") and not (isinstance(crop, float | int) and 0 < crop <= 1):
        raise ValueError(f"{name} center_crop={crop!r} must be above 0 and at most 1, or 'stretch'")
    count = len(split)
    if isinstance(split, ImageTensors):
        images = split.images
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"{name} images must be uint8 [N, C, H, W] and are {images.dtype}"
                f" {list(images.shape)}"
            )
    labels = per_sample(split, "labels")
    if labels is not None:
        check_labels(labels, name, count=count, num_classes=num_classes)
    groups = per_sample(split, "groups")
    if groups is not None and groups.shape != (count,):
        raise ValueError(f"{name} groups must have the shape [{count}], not {list(groups.shape)}")


def check_labels(labels: Tensor, name: str, *, count: int, num_classes: int) -> None:
    """Check that there are `count` labels, int64 from 0 to `num_classes` - 1; ValueError if not."""
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(
            f"{name} labels must be int64 [{count}] and are {labels.dtype} {list(labels.shape)}"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"{name} labels must be 0 to {num_classes - 1} and are {labels.min()} to {labels.max()}"
        )


def class_counts(split: Split, num_classes: int) -> Tensor | None:
    """Return the number of samples of each class, int64 [num_classes]; None if it is unknown."""
    labels = per_sample(split, "labels")
    return None if labels is None else torch.bincount(labels.cpu(), minlength=num_classes)


def build_loaders(
    datasets: Datasets,
    config: DataConfig,
    *,
    world: World,
    seed: int,
    global_batch_size: int,
    eval_batch_size: int,
    memory_format: torch.memory_format,
    share: range | None = None,
) -> Loaders:
    """Return this rank's loaders. The batch sizes are the numbers of samples over all ranks.

    share: the positions of this rank's samples in each global batch. If they are given, evaluation
    batches are whole, so `eval_batch_size` is that of one rank; None: every W-th sample.
    """
    shape = datasets.image_shape
    num_classes = len(datasets.class_names)
    bad_samples: list[tuple[str, str]] = []

    reader = partial(
        build_reader,
        config=config,
        image_shape=shape,
        num_classes=num_classes,
        world=world,
        bad=bad_samples,
    )
    normalize = Normalize(config.mean, config.std, device=world.device, memory_format=memory_format)
    train = reader(datasets.train)
    sampler = GlobalBatchSampler(
        len(train),
        global_batch_size=global_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        seed=seed,
        share=share,
        draw=build_draw(config.sampling, datasets.train, num_classes),
    )
    return Loaders(
        train=TrainLoader(
            train,
            sampler,
            augmentation=Augmentation(config.augment, height=shape[1], width=shape[2], seed=seed),
            normalize=normalize,
            device=world.device,
            num_classes=num_classes,
        ),
        eval=EvaluationLoader(
            reader(datasets.eval),
            normalize,
            world,
            batch_size=eval_batch_size,
            are_batches_whole=share is not None,
        ),
        datasets=datasets,
        preprocessing={
            "mean": config.mean,
            "std": config.std,
            "image_shape": list(shape),
            "center_crop": member(datasets.eval, "center_crop"),
        },
        bad_samples=bad_samples,
    )


def build_reader(
    split: Split,
    *,
    config: DataConfig,
    image_shape: Shape,
    num_classes: int,
    world: World,
    bad: list[tuple[str, str]],
) -> Reader:
    """Return the reader of `split`, which appends (name, reason) of each bad sample to `bad`."""
    if isinstance(split, ImageTensors):
        return ResidentReader(split, device=world.device)
    return SampleReader(
        split,
        image_shape=image_shape,
        num_classes=num_classes,
        num_workers=num_readers(config.num_workers, local_world_size=world.local_world_size),
        pin_memory=world.device.type == "cuda",
        blank=torch.tensor(config.mean).mul(255).round().to(torch.uint8)[:, None, None],
        bad=bad,
    )


def num_readers(num_workers: int | str, *, local_world_size: int) -> int:
    """Return the number of reading threads; auto: usable cores / ranks of this node, 2 to 16."""
    if isinstance(num_workers, int):
        return num_workers
    return min(16, max(2, usable_cores() // local_world_size))
