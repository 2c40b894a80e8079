"""`sync.batch_norm=sync`: BatchNorm with the statistics of all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import launch, on_ranks
from runs import BATCHNORM, TINY, in_process_group, newest_checkpoint, train_on
from torch import Tensor, nn

from ddp_trainer.distributed.world import World
from ddp_trainer.sync.batch_norm import synchronize_batch_norm

SHAPE = (12, 5, 6, 7)


def forward_and_backward(layer: nn.Module, images: Tensor, target: Tensor) -> dict[str, Any]:
    """Return the output, all gradients of a loss that is a sum, and the buffers after two steps."""
    outputs = {}
    for step in range(2):
        inputs = (images + step).requires_grad_()
        output = layer(inputs)
        (output * target).sum().backward()
        outputs |= {f"output {step}": output.detach(), f"gradient {step}": inputs.grad}
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    tensors = {**outputs, **gradients, **dict(layer.named_buffers())}
    return {name: tensor.numpy() for name, tensor in tensors.items()}  # which a queue can send


def tensors(momentum: float | None) -> tuple[nn.Module, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    layer = nn.Sequential(nn.BatchNorm2d(SHAPE[1], momentum=momentum))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=random) + 0.5)
    images = 3 * torch.randn(SHAPE, generator=random) + 20
    return layer, images, torch.randn(SHAPE, generator=random)


def on_a_part(momentum: float | None, sizes: list[int]) -> dict[str, Tensor]:
    with in_process_group() as world:
        layer, images, target = tensors(momentum)
        layer = synchronize_batch_norm(layer, world)
        images, target = (whole.split(sizes)[world.rank] for whole in (images, target))
        return forward_and_backward(layer, images, target)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("sizes", [[12], [6, 6], [1, 4, 7]])
def test_ranks_normalize_like_one_process(sizes: list[int], momentum: float | None) -> None:
    expected = forward_and_backward(*tensors(momentum))
    parts = on_ranks(len(sizes), on_a_part, momentum, sizes)
    for name, array in expected.items():
        tensor = torch.from_numpy(array)
        values = [torch.from_numpy(part[name]) for part in parts]
        if tensor.shape == SHAPE:
            found = torch.cat(values)
        elif "running" in name or "num" in name:
            [found] = {tuple(value.flatten().tolist()): value for value in values}.values()
        else:  # each rank has its share of the gradient of a parameter
            found = torch.stack(values).sum(0)
        torch.testing.assert_close(found, tensor, rtol=2e-5, atol=2e-5)


def test_training_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """With local statistics it does, by more than a hundred times as much."""
    words = (*TINY, *BATCHNORM, "max_steps=3", "optimizer.lr=0.01", f"output_dir={tmp_path}")
    differences = {}
    for kind in ("sync", "local"):
        models = []
        for world_size in (1, 2, 3):
            name = f"{kind}-{world_size}"
            train_on(world_size, *words, f"sync.batch_norm={kind}", f"name={name}")
            models.append(newest_checkpoint(tmp_path / name)["model"])
        first, *others = models
        differences[kind] = max(
            float((other[key] - first[key]).abs().max())
            for other in others
            for key in first
            if first[key].is_floating_point()
        )
    assert differences["sync"] < 1e-4 < 1e-2 < differences["local"]


class Doubled(nn.BatchNorm2d):
    """A layer that does more than BatchNorm."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_layers_that_do_more_are_refused() -> None:
    world: Any = World
    with pytest.raises(ValueError, match=r"^sync\.batch_norm=sync cannot replace the layer Doub"):
        synchronize_batch_norm(nn.Sequential(Doubled(3)), world)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("sync.batch_norm=sync", "shards=4", *BATCHNORM), "sync.batch_norm=local"),
        (("sync.batch_norm=sync", "check.every_steps=3", *BATCHNORM), "sync.batch_norm=local"),
        (("sync.batch_norm=sync",), "needs a model with BatchNorm, and this model has none"),
    ],
)
def test_what_it_does_not_fit_is_one_error(
    words: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    done = launch(*TINY, *words, f"output_dir={tmp_path}")
    assert done.code == 2
    assert error in done.output
    assert "Traceback" not in done.output
