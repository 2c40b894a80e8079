"""The sizes of a model's activations that `channel_parallel` and a pipeline of two stages send."""

import torch
from torch import Tensor, nn

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.sync.buffers import preserved_buffers
from ddp_trainer.sync.channel_parallel import channel_dim
from ddp_trainer.sync.pipeline import cut
from ddp_trainer.tools.costs import Activations


@torch.no_grad()
def measure_activations(model: nn.Module, image_shape: tuple[int, ...]) -> Activations:
    """Return the sizes for images of `image_shape`, (channels, height, width)."""
    device = next(model.parameters()).device
    images = torch.zeros(2, *image_shape, device=device)
    sizes: list[int] = []

    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(2 * inputs[0].numel() + output.numel())

    hooks = [
        layer.register_forward_hook(add)
        for layer in model.modules()
        if channel_dim(layer) is not None
    ]
    with preserved_buffers(model):
        model(images)
    for hook in hooks:
        hook.remove()
    per_image = 4 / len(images)
    known = Activations(
        image_bytes=4 * images[0].numel(),
        channel_bytes=int(per_image * sum(sizes)),
        num_layers=len(sizes),
    )
    try:
        pipeline = cut(model, image_shape, num_stages=2, device=device)
    except ConfigError:
        return known
    with preserved_buffers(model):
        values = pipeline.stages[0](images)
    gradients = [0, 0]
    for name, parameter in model.named_parameters():
        gradients[pipeline.owners[name]] += 4 * parameter.numel() * parameter.requires_grad
    return known._replace(
        cut_bytes=int(per_image * values.numel()),
        largest_share=max(pipeline.flops) / sum(pipeline.flops),
        stage_gradient_bytes=max(gradients),
    )
