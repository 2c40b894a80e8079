"""The first passes of a launch, on black images: DDP builds its buckets, and the model compiles."""

from typing import Any

import torch
from torch import Tensor

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.loaders import Loaders
from ddp_trainer.training.step import TrainStep


def prime(step: TrainStep, loaders: Loaders, config: Any) -> None:
    """Run forward and backward without an update; check the shapes of the logits and the losses.

    Collective: every rank must call this.

    Raises:
        ConfigError: logits or losses have a wrong shape, or the model cannot train on one image.
    """
    device = step.world.device
    passes = step.settings.gradient_accumulation_steps
    smallest = config.global_batch_size // (config.shards or step.world.world_size * passes)
    share = loaders.sampler.local_batch_size
    # A GPU and the compiler choose kernels by the size of a batch; otherwise two images are enough.
    is_exact = config.compile or device.type == "cuda"
    count = share // passes if is_exact else min(2, smallest)
    counts = [count, count + 1] if config.compile and share % passes else [count]
    black = [
        torch.zeros(number, *loaders.datasets.image_shape, dtype=torch.uint8, device=device)
        for number in counts
    ]
    try:
        logits = step.prime_ddp(*map(loaders.train.normalize, black))
    except ValueError as error:  # BatchNorm raises it, because one value has no variance
        if smallest > 1:
            raise
        raise ConfigError(
            f"global_batch_size={config.global_batch_size} leaves a rank only one image per pass, "
            f"and model={config.model.name} cannot train on a single image ({error}): raise "
            "global_batch_size, or start fewer ranks"
        ) from error

    shape = [count, len(loaders.datasets.class_names)]
    # on all ranks, because a loss of a plug-in may be wrong on one of them
    step.world.raise_on_any_rank(lambda: check_outputs(step, logits, shape, config))


def check_outputs(step: TrainStep, logits: Tensor, expected: list[int], config: Any) -> None:
    """Check that logits, and their losses, have the right shapes; ConfigError if not."""
    require(
        list(logits.shape) == expected,
        f"model={config.model.name} must return logits [images, classes], which is {expected} "
        f"here, and returns {list(logits.shape)}",
    )
    labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    losses = step.loss_per_sample(logits.float().requires_grad_(), labels)
    is_tensor = torch.is_tensor(losses)
    returned = f"a tensor of the shape {list(losses.shape)}" if is_tensor else type(losses).__name__
    require(
        is_tensor and losses.shape == labels.shape,
        f"loss={config.loss.name} must return one value per sample, a tensor of the shape "
        f"[{len(labels)}] here, and returns {returned}: for a loss of torch, set reduction='none'",
    )
    require(
        losses.is_floating_point() and losses.requires_grad,
        f"loss={config.loss.name} must return float values with a gradient",
    )
