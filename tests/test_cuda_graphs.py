"""CUDA graphs without a GPU: the batches of a captured loader, and the configs that use graphs.

On a GPU, tests/test_gpu.py compares the bits of trainings with and without graphs.
"""

from dataclasses import replace

import pytest
import torch
from runs import compose, world_of

from ddp_trainer import registry
from ddp_trainer.config.errors import ConfigError
from ddp_trainer.cuda_graphs import CapturedLoader, capture_loader, uses_graphs
from ddp_trainer.data.build import build_loaders
from ddp_trainer.data.loaders import Batch, Loaders
from ddp_trainer.distributed.world import World
from ddp_trainer.start import read_data

CPU = world_of()
GPU = world_of(device="cuda:0")
BATCH = 64


def loaders(*overrides: str) -> Loaders:
    config = compose(f"global_batch_size={BATCH}", *overrides)
    return build_loaders(
        read_data(config.data, global_batch_size=BATCH),
        config.data,
        world=CPU,
        seed=0,
        global_batch_size=BATCH,
        eval_batch_size=BATCH,
        memory_format=torch.channels_last,
    )


@pytest.mark.parametrize(("epoch", "step"), [(0, 0), (1, 3), (0, 21)])
def test_a_captured_loader_yields_the_same_batches(epoch: int, step: int) -> None:
    plain = loaders(
        "data.augment.random_crop_padding=2",
        "data.augment.random_hflip=true",
        "data.augment.random_erasing=0.5",
    ).train
    captured = CapturedLoader(plain)
    captured.captured = captured.read  # type: ignore[assignment]  # which is what a graph replays
    plain.sampler.set_epoch(3, 2)
    next(iter(captured))  # an epoch that was left
    plain.sampler.set_epoch(epoch, step)
    expected = list(plain)
    found = [Batch(*batch) for batch in captured]
    assert len(found) == len(expected) == plain.sampler.steps_per_epoch - step
    for one, other in zip(found, expected, strict=True):
        assert one.images.equal(other.images)
        assert one.images.stride() == other.images.stride()
        assert one.labels.equal(other.labels)
        assert one.ids.equal(other.ids)


@pytest.mark.parametrize(
    ("overrides", "is_captured"),
    [
        ((), True),
        (("data.augment.mixup=0.2",), False),
        (("data.augment.cutmix=1",), False),
        (("data.augment.rand_augment=2",), False),
        (("data.augment.color_jitter=0.4",), False),
    ],
)
def test_batches_whose_numbers_the_host_draws_are_not_captured(
    overrides: tuple[str, ...], is_captured: bool
) -> None:
    found = capture_loader(loaders(*overrides)).train
    assert isinstance(found, CapturedLoader) == is_captured


@pytest.mark.parametrize(
    ("overrides", "world", "is_captured"),
    [
        ((), GPU, True),
        (("model=lenet", "optimizer=adamw", "sync=none"), GPU, True),
        (("cuda_graphs=false",), GPU, False),
        ((), CPU, False),
        ((), replace(GPU, world_size=2), False),
        (("sync.comm_hook=fp16",), GPU, False),
        (("sync=allreduce",), GPU, False),
        (("check.every_steps=10",), GPU, False),
        (("model=timm", "model.arch=test_resnet"), GPU, False),  # its code is not ours
        (("model=timm", "model.arch=test_resnet", "cuda_graphs=true"), GPU, True),
        (("optimizer=lamb",), GPU, False),
        (("observer=[report]",), GPU, True),
    ],
)
def test_steps_are_captured_if_no_code_decides_on_the_host(
    overrides: tuple[str, ...], world: World, is_captured: bool
) -> None:
    assert uses_graphs(compose(*overrides), world) == is_captured


def test_a_step_with_an_observer_of_the_user_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose("observer=[report]")
    assert uses_graphs(config, GPU)
    choice = registry.choices("observer")["report"]
    monkeypatch.setitem(registry._choices["observer"], "report", replace(choice, builder=print))
    assert not uses_graphs(config, GPU)
    assert uses_graphs(replace(config, cuda_graphs=True), GPU)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ((), CPU),
        ((), replace(GPU, world_size=2)),
        (("optimizer=lars",), GPU),
        (("sync=ring",), GPU),
        (("check.every_steps=10",), GPU),
    ],
)
def test_a_graph_that_is_asked_for_and_impossible_is_an_error(
    overrides: tuple[str, ...], world: World
) -> None:
    with pytest.raises(ConfigError, match=r"^cuda_graphs=true needs one rank with a GPU"):
        uses_graphs(compose("cuda_graphs=true", *overrides), world)
