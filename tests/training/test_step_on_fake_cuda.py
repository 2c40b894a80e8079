"""The parts of a step on fake CUDA tensors, which compute shapes and devices without a GPU.

A mix of devices raises an error, and so does an operation that waits for a value from the GPU.
Autograd needs a real device, so the gradients are set by hand.
"""

from collections.abc import Iterator

import pytest
import torch
from runs import step_settings, world_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import SGD, AdamW

from ddp_trainer.config.losses import CrossEntropyConfig
from ddp_trainer.config.sync import NoSyncConfig
from ddp_trainer.data.loaders import Batch
from ddp_trainer.models import weights
from ddp_trainer.optim.losses import build_cross_entropy
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.buffers import flatten_buffers
from ddp_trainer.sync.fingerprint import bit_sum
from ddp_trainer.training.evaluation import SampleResults, evaluate
from ddp_trainer.training.metrics import SampleDigest
from ddp_trainer.training.step import StepSettings, TrainStep

CUDA = torch.device("cuda", 0)
WORLD = world_of(device="cuda:0")
SETTINGS = {
    "plain": step_settings(),
    "clipped": step_settings(max_grad_norm=1.0),
    "skipping": step_settings(skips_nonfinite=True),
    "averaged": step_settings(ema_decay=0.9),
    "all": step_settings(max_grad_norm=1.0, skips_nonfinite=True, ema_decay=0.9),
}


def fake_model() -> nn.Module:
    with torch.device(CUDA):
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))


@pytest.fixture(autouse=True)
def fake_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Copying a fake tensor reads its memory, which it does not have.
    monkeypatch.setattr(weights.copy, "deepcopy", lambda model: fake_model())
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def build(settings: StepSettings, optimizer_class: type = SGD) -> TrainStep:
    model = fake_model()
    # A fused optimizer asks for a driver, and so do autocast and the scaler.
    if settings.skips_nonfinite:  # only fused optimizers can skip an update
        optimizer_class = type("Skipping", (optimizer_class,), {"step": lambda self: None})
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    return TrainStep(
        model,
        GradientSync(NoSyncConfig(), WORLD),
        optimizer,
        lambda step: 1.0,
        loss=build_cross_entropy(CrossEntropyConfig(label_smoothing=0.1), class_counts=None),
        settings=settings,
        world=WORLD,
    )


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(shape, device=CUDA)


def labels_on_cuda(count: int) -> Tensor:
    return torch.randint(3, (count,), device=CUDA)


def test_a_wait_and_a_mix_of_devices_are_noticed() -> None:
    with pytest.raises(DataDependentOutputException):
        on_cuda(1).item()
    with pytest.raises(Exception, match="device"):
        _ = on_cuda(2) + torch.zeros(2)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_loss_and_sums_stay_on_the_device(is_mixed: bool) -> None:
    step = build(SETTINGS["plain"])
    labels = torch.rand(8, 3, device=CUDA) if is_mixed else labels_on_cuda(8)
    with torch.no_grad():
        loss, loss_sum, logits = step.compute_loss(step.model, on_cuda(8, 1, 6, 6), labels)
    step.sums.add(loss_sum, logits, labels)
    for value in (loss, loss_sum, logits, step.sums.vector):
        assert isinstance(value, FakeTensor)
        assert value.device == CUDA


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("optimizer_class", [SGD, AdamW])
def test_an_update_waits_for_nothing(name: str, optimizer_class: type) -> None:
    settings = SETTINGS[name]
    step = build(settings, optimizer_class)
    for parameter in step.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    statistics = flatten_buffers(step.model) if settings.skips_nonfinite else None
    step.update(on_cuda(), statistics)
    if step.ema is not None:
        step.ema.update()
    assert step.nonfinite.flag.device == CUDA
    assert bit_sum([*step.model.parameters()]).device == CUDA


def test_digests_and_results_stay_on_the_device() -> None:
    digest = SampleDigest(CUDA)
    digest.add(torch.arange(8, device=CUDA), step=3)
    assert digest.vector.device == CUDA
    batch = Batch(on_cuda(8, 1, 6, 6), labels_on_cuda(8), torch.arange(8, device=CUDA))
    model = build(SETTINGS["plain"]).model
    results = evaluate(model, [batch], CUDA, None, keeps_probabilities=True)
    assert isinstance(results, SampleResults)
    assert all(part.device == CUDA for part in [*results.parts, *results.probabilities])
