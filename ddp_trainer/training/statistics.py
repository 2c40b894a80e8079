"""The statistics of BatchNorm that a model has in an evaluation, if epochs are short.

A BatchNorm layer keeps a running mean of its statistics, in which each step has a weight of 0.1.
The running mean therefore belongs to the weights of about ten steps ago. While the weights change
fast, it does not fit them, and a model that has learned something is evaluated as if it had not:
with 4 steps an epoch, its loss was 4,000 for several epochs.
"""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_trainer.training.evaluation import eager
from ddp_trainer.training.run import TrainingRun

SHORT_EPOCH = 20
"""Below so many steps an epoch, statistics are computed anew; above, the running mean is good."""
NUM_BATCHES = 4
NUM_IMAGES = 256
"""The statistics are those of the last batches: at least so many, with at least so many images."""


@torch.no_grad()
def refresh_statistics(run: TrainingRun) -> None:
    """Give the evaluated model BatchNorm statistics of its weights, at the end of a short epoch.

    They are this rank's; with `shards` or SyncBatchNorm, all ranks'. No gradient depends on them.
    """
    steps = run.steps_per_epoch
    model = run.train_step.models[-1]
    layers = [
        layer
        for trained, layer in zip(run.model.modules(), model.modules(), strict=True)
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and trained.training
    ]  # a frozen layer is not in training mode
    if not layers or steps >= SHORT_EPOCH or run.step % steps:
        return
    batches = min(steps, max(NUM_BATCHES, -(-NUM_IMAGES // run.config.global_batch_size)))
    kept = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
    model.eval()  # without dropout, as in the evaluation
    for layer in layers:
        layer.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=run.world.device)
        layer.momentum = None  # the mean over all batches
        layer.train()

    def reset() -> None:
        for layer in layers:
            layer.reset_running_stats()

    run.loaders.sampler.set_epoch(run.epoch, steps - batches)
    try:
        with eager(model), run.train_step.sync.whole(model):
            run.train_step.measure_statistics(model, run.loaders.train, reset)
    finally:  # also if a rank is lost, after which this is done again
        for layer, (momentum, count) in zip(layers, kept, strict=True):
            layer.momentum = momentum
            layer.num_batches_tracked = count
