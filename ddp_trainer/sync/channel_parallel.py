"""Channel parallelism: each rank computes some of the output channels of each layer.

All ranks see the whole batch. A rank keeps 1/W of the weights of a convolution or a linear layer,
computes 1/W of its channels, and the ranks gather the channels before the next layer. In backward,
each rank has a part of the gradient of the layer's input, which the ranks sum. This strategy shows
why layers are seldom split over slow links: activations grow with the batch and weights do not, so
that more is sent than with data parallelism, except by wide layers on few pixels. For a layer with
a values of input and b of output, a rank sends (W − 1)/W·b values in forward, and 2·(W − 1)/W·a in
backward. The gradients of its weights stay on the rank.

A rank reads its share of the batch, as always; the images are gathered before the first layer, and
after the last one, a rank goes on with the logits of its own images. BatchNorm uses the statistics
of the whole batch.

Source: Dive into Deep Learning, "Training on Multiple GPUs", splitting the work of a layer;
Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014 (arXiv 1404.5997);
Shoeybi et al., Megatron-LM, 2019 (arXiv 1909.08053), for the operators f and g.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ddp_trainer.config.errors import require
from ddp_trainer.distributed.world import World
from ddp_trainer.sync.buffers import preserved_buffers
from ddp_trainer.sync.sharded import ShardedSync, gather_parts, split_rows


class ChannelParallelSync(ShardedSync):
    """Splits the output channels of convolutions without groups, and of linear layers."""

    is_whole = False
    """Whether a layer has all channels now, because `whole` has gathered them."""

    def __init__(self, config: Any, world: World) -> None:
        super().__init__(config, world)
        self.layers: dict[nn.Module, str] = {}
        """The split layers of the trained model, and their names."""

    @property
    def random_stream(self) -> int:
        return 0  # because all ranks compute the same batch

    def wrap(self, model: nn.Module) -> nn.Module:
        super().wrap(model)
        return WholeBatch(model, self) if self.world.world_size > 1 else model

    def shard(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Split each layer that has a channel for each rank; a tied layer stays whole."""
        uses = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
        for name, layer in list(model.named_modules()):
            own_parameters = dict(layer.named_parameters(recurse=False))
            is_tied = any(uses[parameter] > 1 for parameter in own_parameters.values())
            dim = channel_dim(layer)
            if dim is None or is_tied:
                continue
            sizes = split_rows(len(own_parameters["weight"]), self.world.world_size)
            if not sizes[-1]:
                continue
            if model is self.model:
                self.layers[layer] = name
            for key, whole in own_parameters.items():
                path = f"{name}.{key}".lstrip(".")
                self.rows[path] = len(whole)
                part = self.part(path, whole.detach())
                setattr(layer, key, nn.Parameter(part, requires_grad=whole.requires_grad))
            layer.register_forward_pre_hook(self.spread)
            layer.register_forward_hook(partial(self.collect, sizes, dim))
        return dict(model.named_parameters())

    def spread(self, _: nn.Module, inputs: tuple[Tensor]) -> Any:
        """Prepare the input of a layer of which each rank computes a part."""
        return inputs if self.is_whole else Spread.apply(inputs[0], self.world)

    def collect(
        self, sizes: list[int], dim: int, _: nn.Module, inputs: tuple[Tensor], output: Tensor
    ) -> Any:
        """Return the output of a layer with the channels of all ranks."""
        return output if self.is_whole else Gather.apply(output, sizes, dim, self.world)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        self.is_whole = True
        try:
            with super().whole(model):
                yield
        finally:
            self.is_whole = False


def channel_dim(layer: nn.Module) -> int | None:
    """Return the dimension of the output's channels; None for a layer that is not split.

    Subclasses are not split, because their weights may be used in other ways, as by attention.
    """
    if type(layer) is nn.Linear:
        return -1
    return 1 if type(layer) is nn.Conv2d and layer.groups == 1 else None


class Spread(Function):
    """The identity. In backward, each rank has a part of the gradient, and gets the sum."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, world: World) -> Tensor:
        ctx.world = world
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return ctx.world.all_reduce(grad_outputs[0].contiguous().clone()), None


class Gather(Function):
    """The parts of all ranks, one after another. In backward, each rank gets that of its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sizes: list[int], dim: int, world: World) -> Tensor:
        ctx.sizes = sizes
        ctx.dim = dim
        ctx.rank = world.rank
        return gather_parts(part, sizes, world, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0].split(ctx.sizes, ctx.dim)[ctx.rank], None, None, None


class OwnRows(Function):
    """The rows of this rank's images. In backward, the gradients of all ranks' rows, times 1/W.

    The factor is there because the loss is scaled for gradients whose mean over ranks is taken.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sizes: list[int], world: World) -> Tensor:
        ctx.sizes = sizes
        ctx.world = world
        return logits.split(sizes)[world.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        rows = gather_parts(grad_outputs[0], ctx.sizes, ctx.world)
        return rows / ctx.world.world_size, None, None


class WholeBatch(nn.Module):
    """Calls a model with the images of all ranks; returns the logits of this rank's images."""

    def __init__(self, model: nn.Module, sync: ChannelParallelSync) -> None:
        super().__init__()
        self.model = model
        self.sync = sync
        self.is_checked = False

    def forward(self, images: Tensor) -> Tensor:
        """Images: float32 [B, C, H, W]; B may differ between ranks. Collective."""
        world = self.sync.world
        count = torch.tensor([len(images)], device=images.device)
        sizes = [int(size) for size in world.all_gather(count)]
        whole = gather_parts(images, sizes, world)
        if not self.is_checked:
            self.check(whole)
        return OwnRows.apply(self.model(whole), sizes, world)  # type: ignore[no-any-return]

    @torch.no_grad()
    def check(self, images: Tensor) -> None:
        """Check that the model calls all split layers.

        Raises:
            ConfigError: it does not; it may use the weights of a layer in another way.
        """
        called: list[nn.Module] = []
        hooks = [
            layer.register_forward_hook(lambda layer, *_: called.append(layer))
            for layer in self.sync.layers
        ]
        with self.sync.whole(self.model), preserved_buffers(self.model):
            self.model(images)
        for hook in hooks:
            hook.remove()
        others = [name for layer, name in self.sync.layers.items() if layer not in called]
        require(
            not others,
            f"sync=channel_parallel cannot split {', '.join(others[:1])}, because the model does"
            " not call this layer: use sync=ddp",
        )
        self.is_checked = True
