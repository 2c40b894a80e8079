"""The models' layers, sizes and initial weights."""

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from ddp_trainer.config.errors import ConfigError
from ddp_trainer.config.models import LeNetConfig, LeNetInit, ResNet18Config, Stem
from ddp_trainer.models import build_model

FASHION = (1, 28, 28)


def lenet(config: LeNetConfig | None = None, shape: tuple[int, int, int] = FASHION) -> nn.Module:
    return build_model(config or LeNetConfig(), image_shape=shape, num_classes=10)


def resnet(stem: Stem, shape: tuple[int, int, int], num_classes: int = 10) -> nn.Module:
    return build_model(ResNet18Config(stem=stem), image_shape=shape, num_classes=num_classes)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def output_shapes(model: nn.Module, images: Tensor) -> list[tuple[int, ...]]:
    """Return the shape of one image after each child of `model` that a forward pass calls."""
    shapes: list[tuple[int, ...]] = []
    for child in model.children():
        child.register_forward_hook(
            lambda module, inputs, output: shapes.append(tuple(output.shape[1:]))
        )
    model(images)
    return shapes


def test_lenet_has_the_layers_of_d2l() -> None:
    shapes = output_shapes(lenet(), torch.zeros(2, *FASHION))
    assert count_parameters(lenet()) == 129_068
    assert shapes == [
        (20, 26, 26),
        (20, 26, 26),
        (20, 13, 13),
        (50, 9, 9),
        (50, 9, 9),
        (50, 4, 4),
        (800,),
        (128,),
        (128,),
        (10,),
    ]


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 13, 13), (3, 14, 14), (4, 28, 20), (3, 32, 32)])
def test_lenet_takes_any_channels_and_sizes_from_8(shape: tuple[int, int, int]) -> None:
    assert lenet(shape=shape)(torch.zeros(2, *shape)).shape == (2, 10)


def test_lenet_refuses_images_under_8_pixels() -> None:
    with pytest.raises(ConfigError, match="at least 8×8 pixels, and these have 7×9"):
        lenet(shape=(1, 7, 9))


def test_the_d2l_init_is_normal_with_deviation_a_hundredth() -> None:
    torch.manual_seed(0)
    for layer in lenet(LeNetConfig(init=LeNetInit.d2l)).children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            count = layer.weight.numel()
            assert layer.weight.mean().item() == pytest.approx(0, abs=5 * 0.01 / count**0.5)
            assert layer.weight.std().item() == pytest.approx(0.01, rel=5 / (2 * count) ** 0.5)
            assert layer.bias is not None
            assert not layer.bias.any()


def test_the_default_init_is_pytorchs() -> None:
    torch.manual_seed(0)
    first = next(lenet().children())
    torch.manual_seed(0)
    assert isinstance(first, nn.Conv2d)
    assert torch.equal(first.weight, nn.Conv2d(1, 20, kernel_size=3).weight)


@pytest.mark.parametrize("side", [8, 28, 32])
def test_resnets_small_stem_keeps_the_resolution(side: int) -> None:
    shapes = output_shapes(
        resnet(Stem.small, (3, side, side)).eval(), torch.zeros(1, 3, side, side)
    )
    assert shapes[:4] == [(64, side, side)] * 4  # convolution, norm, ReLU, no pool
    assert shapes[4] == (64, side, side)
    assert [shape[1] for shape in shapes[5:8]] == [-(-side // 2), -(-side // 4), -(-side // 8)]


def test_resnet_with_the_imagenet_stem_is_torchvisions() -> None:
    ours = resnet(Stem.imagenet, (3, 64, 64), num_classes=7)
    theirs = resnet18(num_classes=7)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


def test_by_default_the_stem_is_chosen_by_the_size_of_the_images() -> None:
    for side, expected in ((32, 3), (63, 3), (64, 7), (224, 7)):
        model = build_model(ResNet18Config(), image_shape=(3, side, 224), num_classes=10)
        assert model.get_parameter("conv1.weight").shape[-1] == expected


@pytest.mark.parametrize(
    ("stem", "channels", "kernel"), [(Stem.small, 1, 9), (Stem.imagenet, 4, 49)]
)
def test_resnet_takes_any_number_of_channels(stem: Stem, channels: int, kernel: int) -> None:
    model = resnet(stem, (channels, 32, 32)).eval()
    assert model(torch.zeros(2, channels, 32, 32)).shape == (2, 10)
    assert count_parameters(model) == count_parameters(resnet18(num_classes=10)) - 64 * (
        3 * 49 - channels * kernel
    )


def test_a_new_first_convolution_is_drawn_as_torchvision_draws_the_others() -> None:
    torch.manual_seed(0)
    weight = resnet(Stem.small, (3, 32, 32)).get_parameter("conv1.weight")
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)
