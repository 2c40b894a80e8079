"""Tests that need a GPU: the guarantees on its kernels, no wait in a step, every precision,
compile.

`benchmarks/gpu.sh` runs these, and the comparison with peers, in one go.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import on_ranks
from runs import (
    TINY,
    assert_bitwise,
    compose,
    kill_in_training,
    newest_checkpoint,
    read_summary,
    records,
    trained_state,
)

from ddp_trainer.training.step import TrainStep
from ddp_trainer.training_run import DeviceMemoryError, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

FP32 = ("precision=fp32", "deterministic=true")
GPU = (*TINY, "device=cuda")


def losses(run_dir: Path) -> list[float]:
    return [record["train/loss"] for record in records(run_dir, "train/loss")]


@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_stopped_and_resumed_is_bitwise_the_same(model: str, train_in: Callable[..., Path]) -> None:
    common = (
        *GPU,
        *FP32,
        f"model={model}",
        "checkpoint.every_steps=3",
        "data.augment.random_crop_padding=2",
    )
    whole = train_in("whole", *common)
    train_in("parts", *common, "max_steps=5")
    parts = train_in("parts", *common)
    one = newest_checkpoint(whole)
    other = newest_checkpoint(parts)
    assert_bitwise([one["model"], one["optimizer"]], [other["model"], other["optimizer"]])


@pytest.mark.fault("SIGKILL of a training on a GPU")
def test_killed_and_resumed_is_bitwise_the_same(
    tmp_path: Path, train_in: Callable[..., Path]
) -> None:
    common = (
        *GPU,
        *FP32,
        "epochs=40",
        "checkpoint.every_steps=3",
        "data.augment.random_hflip=true",
    )
    whole = train_in("whole", *common)
    config = compose(*common, f"output_dir={tmp_path}", "name=killed")
    for after in (0.1, 0.4):
        kill_in_training(1, config, tmp_path / "killed", after=after)
    killed = train_in("killed", *common)
    assert_bitwise(trained_state(killed), trained_state(whole))


def _message_of_a_full_memory(overrides: tuple[str, ...]) -> str:
    torch.cuda.set_per_process_memory_fraction(0.01)
    with pytest.raises(DeviceMemoryError) as error:
        run(compose(*overrides))
    return str(error.value)


def test_a_full_memory_says_what_to_lower(tmp_path: Path) -> None:
    size = ("data.height=224", "data.width=224", "global_batch_size=64", "model=resnet18")
    overrides = (*GPU, *size, f"output_dir={tmp_path}", "name=run")
    [message] = on_ranks(1, _message_of_a_full_memory, overrides, deadline=100)
    assert "in a pass over 64 images: set gradient_accumulation_steps=2" in message
    assert message.endswith("or global_batch_size=32")


@pytest.mark.parametrize("model", ["lenet", "resnet18"])
def test_the_losses_are_those_of_a_cpu(model: str, train_in: Callable[..., Path]) -> None:
    common = (
        *TINY,
        f"model={model}",
        *FP32,
        "log_every_steps=1",
        "max_steps=5",
        "optimizer.lr=0.01",
    )
    cpu, gpu = (train_in(device, *common, f"device={device}") for device in ("cpu", "cuda"))
    assert losses(gpu) == pytest.approx(losses(cpu), rel=2e-2)  # convolutions of GPUs round to TF32


@pytest.mark.parametrize(
    "extra", [("precision=fp16",), ("precision=bf16",), ("compile=true",), ("max_grad_norm=1",)]
)
def test_digits_are_learned(extra: tuple[str, ...], train_in: Callable[..., Path]) -> None:
    run_dir = train_in(
        "run", "experiment=digits_resnet18", "device=cuda", "epochs=8", *extra, deadline=240
    )
    found = read_summary(run_dir)
    assert found["eval/top1"] > 0.95
    assert 0 < found["mfu"] < 1
    assert records(run_dir, "memory/peak_mb")[-1]["memory/peak_mb"] > 0


CAPTURED = {
    "sgd": ("data.augment.random_hflip=true", "max_grad_norm=1", "ema.decay=0.9"),
    "adamw": (
        "optimizer=adamw",
        "data.augment.random_erasing=0.5",
        "gradient_accumulation_steps=2",
    ),
    "mixup": ("data.augment.mixup=0.2", "on_nonfinite=skip", "sync=none"),
    "fp16": ("precision=fp16", "model=resnet18"),
    "bf16": ("precision=bf16", "model=resnet18", "data.augment.rand_augment=2"),
    "dropout": (
        "model=torchvision",
        "model.arch=mobilenet_v3_small",
        "data.height=64",
        "data.width=64",
    ),
    "compile": ("compile=true", "model=resnet18"),
}
"""Overrides of trainings whose steps a CUDA graph replays."""


@pytest.mark.parametrize("name", CAPTURED)
def test_a_cuda_graph_changes_no_bit(name: str, train_in: Callable[..., Path]) -> None:
    common = (*GPU, *FP32, "data.augment.random_crop_padding=2", *CAPTURED[name])
    with_graph, without = (
        train_in(f"graphs_{key}", *common, f"cuda_graphs={key}", deadline=200)
        for key in ("true", "false")
    )
    one = newest_checkpoint(with_graph)
    other = newest_checkpoint(without)
    assert one["progress"]["digest"].equal(other["progress"]["digest"])
    assert losses(with_graph) == losses(without)
    parts = ("model", "ema", "scaler")
    assert_bitwise([one[part] for part in parts], [other[part] for part in parts])
    assert_bitwise(one["optimizer"]["state"], other["optimizer"]["state"])


@pytest.mark.parametrize(
    "sync", ["none", "allreduce", "ring", "local_sgd", "parameter_server", "data_parallel"]
)
def test_a_strategy_trains_on_one_gpu(sync: str, train_in: Callable[..., Path]) -> None:
    alone = train_in("none", *GPU, *FP32, "sync=none")
    it = train_in(sync, *GPU, *FP32, f"sync={sync}")
    torch.testing.assert_close(newest_checkpoint(it)["model"], newest_checkpoint(alone)["model"])


def _train_without_waiting(overrides: tuple[str, ...]) -> list[str]:
    """Train with `overrides`; CUDA raises an error where a step waits for the device. Return where
    the images were.
    """
    take_step = TrainStep.__call__
    devices = list[str]()

    def step(self: TrainStep, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        devices.append(images.device.type)
        # the first fill caches
        torch.cuda.set_sync_debug_mode("error" if len(devices) > 2 else "default")
        loss = take_step(self, images, labels)
        torch.cuda.set_sync_debug_mode("default")
        return loss

    TrainStep.__call__ = step
    run(compose(*overrides))
    return devices


@pytest.mark.parametrize(
    "extra", [(), ("optimizer=adamw", "max_grad_norm=1", "gradient_accumulation_steps=2")]
)
def test_no_step_waits_for_the_device_which_holds_the_images(
    extra: tuple[str, ...], tmp_path: Path
) -> None:
    overrides = (*GPU, f"output_dir={tmp_path}", "name=run", *extra)
    [devices] = on_ranks(1, _train_without_waiting, overrides, deadline=120)
    assert set(devices) == {"cuda"}
