"""Buffers that a block of code changes, and that have their old bits after it."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_trainer.sync.buffers import preserved_buffers


class Model(nn.Module):
    """Has BatchNorm's buffers, others of several dtypes, and one that each pass replaces."""

    replaced: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("nan", torch.tensor([float("nan"), -0.0, 1e-40]))
        self.register_buffer("large", torch.tensor(2**62 + 1))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("replaced", torch.zeros(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for name in ("nan", "large", "mask", "short"):
            self.get_buffer(name).fill_(0)
        self.replaced = self.replaced + 1
        return self.norm(images)


def bits(model: nn.Module) -> dict[str, list[int]]:
    return {
        name: buffer.reshape(-1).view(torch.uint8).tolist()
        for name, buffer in model.named_buffers()
    }


@pytest.mark.parametrize("is_failing", [False, True])
def test_all_buffers_have_their_old_bits_after_the_block(is_failing: bool) -> None:
    model = Model()
    before = bits(model)
    changed: list[str] = []
    try:
        with preserved_buffers(model):
            model(torch.randn(4, 3))
            changed = [name for name, value in bits(model).items() if value != before[name]]
            if is_failing:
                raise ValueError
    except ValueError:
        assert is_failing
    assert set(changed) == before.keys()
    assert bits(model) == before


def test_parameters_keep_what_the_block_has_done() -> None:
    model = Model()
    with preserved_buffers(model):
        model(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            model.norm.weight.fill_(7)
    assert model.norm.weight.tolist() == [7, 7, 7]
    assert model.norm.weight.grad is not None


def test_a_gpu_is_not_waited_for() -> None:
    with FakeTensorMode(), torch.device("cuda"):
        model = nn.BatchNorm1d(3)
        with preserved_buffers(model):
            model(torch.empty(4, 3))
