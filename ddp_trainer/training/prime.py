"""The first passes of a launch, with black images: they warm up DDP and the compiler."""

from typing import Any

import torch

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.data.loaders import Loaders
from ddp_trainer.training.step import TrainStep


def prime(step: TrainStep, loaders: Loaders, config: Any) -> None:
    """Run the model without an update, and check the shapes of its logits and of the loss.

    Collective: every rank must call this.

    Raises:
        ConfigError: logits or losses have a wrong shape, or BatchNorm would get a single value.
    """
    device = step.world.device
    passes = config.gradient_accumulation_steps
    smallest = config.global_batch_size // step.world.world_size // passes
    share = loaders.sampler.local_batch_size
    # Kernels are chosen by shape on a GPU and by the compiler; elsewhere two images are enough.
    is_exact = config.compile or device.type == "cuda"
    count = share // passes if is_exact else min(2, smallest)
    counts = [count]
    if config.compile and share % passes:
        counts.append(count + 1)
    black = [
        torch.zeros(number, *loaders.datasets.image_shape, dtype=torch.uint8, device=device)
        for number in counts
    ]
    try:
        logits = step.prime_ddp(*map(loaders.train.normalize, black))
    except ValueError as error:  # BatchNorm has no variance of one value
        if smallest > 1:
            raise
        raise ConfigError(
            f"global_batch_size={config.global_batch_size} leaves a rank only one image per pass, "
            f"and model={config.model.name} cannot train on a single image ({error}): raise "
            "global_batch_size, or start fewer ranks"
        ) from error

    expected = [count, len(loaders.datasets.class_names)]
    require(
        list(logits.shape) == expected,
        f"model={config.model.name} must return logits [images, classes], which is {expected} "
        f"here, and returns {list(logits.shape)}",
    )
    labels = torch.zeros(count, dtype=torch.int64, device=device)
    losses = step.loss_per_sample(logits.float(), labels)
    shape = list(getattr(losses, "shape", ()))
    require(
        shape == [count],
        f"loss={config.loss.name} must return one value per sample, a tensor of the shape "
        f"[{count}] here, and returns {type(losses).__name__} {shape or ''}".rstrip(),
    )
