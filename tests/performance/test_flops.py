"""Utilization: operations counted by hand, the measured and the rated peak, the tags and the
summary.
"""

import copy
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import on_ranks
from runs import TINY, in_process_group, read_summary, records
from torch import Tensor, nn

from ddp_trainer.config.models import LeNetConfig, ResNet18Config
from ddp_trainer.models import build_model
from ddp_trainer.observers import utilization
from ddp_trainer.observers.utilization import (
    measure_matmul,
    rated_peak,
    training_flops,
    utilization_per_rate,
)

CPU = torch.device("cpu")


def test_lenets_operations_are_those_counted_by_hand() -> None:
    model = build_model(LeNetConfig(), image_shape=(1, 28, 28), num_classes=10)
    first = 26 * 26 * 20 * 9  # 28×28 less a 3×3 kernel
    second = 9 * 9 * 50 * 20 * 25  # halved to 13×13, less a 5×5 kernel
    dense = 800 * 128 + 128 * 10  # halved to 4×4
    forward = first + second + dense
    backward = 2 * forward - first  # the images need no gradient
    assert training_flops(model, (1, 28, 28)) == 2 * (forward + backward)


def test_counting_changes_nothing() -> None:
    model = build_model(ResNet18Config(), image_shape=(1, 28, 28), num_classes=10)
    before = copy.deepcopy(model.state_dict())
    assert training_flops(model, (1, 28, 28)) > 1e9
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_that_of_the_matrix_product(dtype: torch.dtype) -> None:
    size = 1024 if dtype is torch.float32 else 256
    left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    ratios: list[float] = []
    for _ in range(10):  # others may keep the cores busy in one of both measurements
        peak = measure_matmul(CPU, dtype)
        began = time.perf_counter()
        for _ in range(5):
            torch.mm(left, right)
        ratios.append(5 * 2 * size**3 / (time.perf_counter() - began) / peak)
    assert min(ratios) < 2
    assert max(ratios) > 0.5


def test_a_product_in_float16_is_measured_soon_on_a_cpu_that_is_slow_at_it() -> None:
    began = time.process_time()
    assert measure_matmul(CPU, torch.float16) > 0
    # one product of 1024×1024 takes 2 s without such instructions
    assert time.process_time() - began < 8


def test_the_utilization_of_a_model_whose_operations_cannot_be_counted_is_unknown() -> None:
    class Gated(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum() > 0 else input  # depends on values

    with in_process_group() as world:
        assert utilization_per_rate(Gated(2, 2), (2,), world=world, dtype=None) == {}


def _utilization_after_another_rank_has_measured(rank: int) -> tuple[bool, float]:
    """Measure on `rank` first; return whether this rank measures, and its result."""
    calls = []
    utilization.measure_matmul = lambda *_: calls.append("") or 1e9
    with in_process_group() as world:
        if world.rank == rank:
            utilization._MEASURED[torch.float32] = 2e9
        found = utilization_per_rate(nn.Linear(2, 2), (2,), world=world, dtype=None)
    return bool(calls), found["matmul_utilization"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_joins_uses_what_another_has_measured(rank: int) -> None:
    flops = training_flops(nn.Linear(2, 2), (2,))
    expected = (False, flops / 2e9)
    assert on_ranks(2, _utilization_after_another_rank_has_measured, rank) == [expected] * 2


A100 = "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "tflops"),
    [
        ("NVIDIA H200", torch.float16, True, 989),
        ("NVIDIA H200 NVL", torch.float16, True, 835),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, True, 989),
        ("NVIDIA H100 PCIe", torch.float16, True, 756),
        ("NVIDIA A100 80GB PCIe", torch.float16, True, 312),
        ("Tesla V100-PCIE-16GB", torch.float16, True, None),
        ("NVIDIA L40S", torch.float16, True, 362),
        ("NVIDIA L4", torch.float16, True, 121),
        (A100, torch.float32, True, 156),  # convolutions use TF32
        (A100, torch.float32, False, 19.5),
        ("NVIDIA GeForce RTX 4090", torch.float16, True, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.float16, True, None),  # a part of a GPU
        ("NVIDIA A10G", torch.float16, True, None),
    ],
)
def test_a_gpus_peak_is_found_by_the_words_of_its_name(
    name: str, dtype: torch.dtype, tf32: bool, tflops: float | None
) -> None:
    assert rated_peak(name, dtype, tf32=tf32) == (None if tflops is None else 1e12 * tflops)


def test_a_run_logs_its_utilization(train_in: Callable[..., Path]) -> None:
    run_dir = train_in("run", *TINY, "log_every_steps=4", "epochs=1", ranks=2)
    logged = records(run_dir, "throughput/matmul_utilization")
    assert len(logged) == 2
    assert all(0 < record["throughput/matmul_utilization"] < 1 for record in logged)
    summary = read_summary(run_dir)
    assert 0 < summary["matmul_utilization"] < 1
    if not torch.cuda.is_available():
        assert summary["mfu"] is None
        assert records(run_dir, "throughput/mfu") == []
