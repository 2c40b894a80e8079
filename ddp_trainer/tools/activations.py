"""The sizes of a model's activations that `channel_parallel` and a pipeline of two stages send."""

import torch
from torch import Tensor, nn

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.sync.buffers import preserved_buffers
from ddp_trainer.sync.channel_parallel import channel_dim
from ddp_trainer.sync.pipeline import cut
from ddp_trainer.tools.costs import Activations
from ddp_trainer.training.step import TrainStep


@torch.no_grad()
def measure_activations(step: TrainStep, image_shape: tuple[int, ...]) -> Activations:
    """Return the sizes for images of `image_shape`, (channels, height, width)."""
    model = step.model
    images = torch.zeros(2, *image_shape, device=step.world.device)
    sizes: list[int] = []

    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(2 * inputs[0].nbytes + output.nbytes)

    hooks = [
        layer.register_forward_hook(add)
        for layer in model.modules()
        if channel_dim(layer) is not None
    ]
    with preserved_buffers(model), step.autocast():
        model.forward(images)  # not `model(images)`, which may be compiled
    for hook in hooks:
        hook.remove()
    known = Activations(
        image_bytes=images[0].nbytes,
        channel_bytes=sum(sizes) // len(images),
        num_layers=len(sizes),
    )
    try:
        pipeline = cut(model, image_shape, num_stages=2, device=images.device)
    except ConfigError:
        return known
    with preserved_buffers(model), step.autocast():
        values = pipeline.stages[0](images)
    gradients = [0, 0]
    for name, parameter in model.named_parameters():
        gradients[pipeline.owners[name]] += parameter.nbytes * parameter.requires_grad
    return known._replace(
        cut_bytes=values.nbytes // len(images),
        largest_share=max(pipeline.flops) / sum(pipeline.flops),
        stage_gradient_bytes=max(gradients),
    )
