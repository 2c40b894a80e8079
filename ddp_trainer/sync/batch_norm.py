"""BatchNorm with the statistics of the batches of all ranks: `sync.batch_norm=sync`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_trainer.config.errors import require
from ddp_trainer.distributed.world import World, waiting


def synchronize_batch_norm(model: nn.Module, world: World) -> nn.Module:
    """Replace each BatchNorm layer of `model` by one that uses the batches of all ranks.

    In place; the layers keep their parameters and buffers. With one rank, nothing is replaced.

    Raises:
        ConfigError: a layer does more than BatchNorm, as in some models of timm, or there is none.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    for layer in layers:
        require(
            type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
            f"sync.batch_norm=sync cannot replace the layer {type(layer).__name__} of this model:"
            " use sync.batch_norm=local, or a model with torch's BatchNorm",
        )
    require(
        bool(layers),
        "sync.batch_norm=sync needs a model with BatchNorm, and this model has none: use"
        " sync.batch_norm=local",
    )
    if world.world_size == 1:
        return model
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, world.group)
    for layer in layers:
        layer.__class__ = CPUSyncBatchNorm
        assert isinstance(layer, CPUSyncBatchNorm)
        layer.process_group = world.group
    return model


class CPUSyncBatchNorm(_BatchNorm):
    """BatchNorm over the batches of all ranks, on a CPU; torch's SyncBatchNorm needs a GPU.

    Source: Ioffe and Szegedy, Batch Normalization, 2015 (arXiv 1502.03167).
    """

    process_group: Any

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`, [B, C, …]. In training mode collective: every rank must call this."""
        if not self.training:
            return super().forward(input)
        values = input.float()
        dims = [0, *range(2, input.ndim)]
        count = torch.full((1,), input.numel() / input.shape[1], dtype=torch.float64)
        variance, mean = torch.var_mean(values, dims, correction=0)
        # float64, because the difference of two squares would lose digits
        local_mean = mean.double()
        squares = variance.double() + local_mean.square()
        sums = torch.cat([count, count * local_mean, count * squares])
        with waiting():
            total = all_reduce(sums, group=self.process_group)
        count, means, squares = total.split([1, len(mean), len(mean)])
        means = means / count
        variances = squares / count - means.square()
        self.update_statistics(means, variances * count / (count - 1))
        shape = [1, -1, *[1] * (input.ndim - 2)]
        scale = (variances + self.eps).rsqrt().float()
        if self.affine:
            scale = scale * self.weight
        output = (values - means.float().view(shape)) * scale.view(shape)
        if self.bias is not None:
            output = output + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of a batch, float64 [C]."""
        if not self.track_running_stats:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # the mean over all batches
            share = 1 / self.num_batches_tracked.item()
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(value.to(running.dtype), share)
