"""Utilization: operations counted by hand, the measured and the rated peak, the tags and the summary."""

import copy
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, read_summary, records
from torch import Tensor, nn

from ddp_trainer.config.models import LeNetConfig, ResNet18Config
from ddp_trainer.models import build_model
from ddp_trainer.performance.flops import RATED_TFLOPS, Utilization, measure_matmul, rated_peak, training_flops

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
    measure = measure_matmul.__wrapped__  # uncached: the best of three, because others may keep the cores busy
    peak = max(measure(CPU, dtype, tf32=False, num_threads=torch.get_num_threads()) for _ in range(3))
    left, right = (torch.randn(512, 512, dtype=dtype) for _ in range(2))
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(left, right)
    assert 20 * 2 * 512**3 / (time.perf_counter() - began) < 2 * peak


def test_nothing_is_measured_before_it_is_asked_for() -> None:
    utilization = Utilization(nn.Linear(2, 2), (2,), device=CPU, dtype=None)
    assert not {"matmul_peak", "rated_peak", "flops_per_image"} & vars(utilization).keys()
    shares = [utilization.of_matmul(rate) or 0.0 for rate in (100.0, 200.0)]
    assert shares[1] == 2 * shares[0] > 0


def test_the_utilization_of_a_model_whose_operations_cannot_be_counted_is_unknown() -> None:
    class Gated(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum() > 0 else input  # depends on values

    utilization = Utilization(Gated(2, 2), (2,), device=CPU, dtype=None)
    assert utilization.of_matmul(100.0) is None
    assert utilization.mfu(100.0) is None


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIE"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("Tesla V100-PCIE-16GB", "V100 PCIE"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_a_gpu_is_found_by_the_words_of_its_name(name: str, entry: str) -> None:
    assert rated_peak(name, torch.float16, tf32=True) == 1e12 * RATED_TFLOPS[entry]["fp16"]


def test_float32_counts_as_tf32_where_convolutions_use_it() -> None:
    peaks = RATED_TFLOPS["A100"]
    assert rated_peak("NVIDIA A100-SXM4-40GB", torch.float32, tf32=True) == 1e12 * peaks["tf32"]
    assert rated_peak("NVIDIA A100-SXM4-40GB", torch.float32, tf32=False) == 1e12 * peaks["fp32"]
    assert rated_peak("Tesla V100-SXM2-32GB", torch.float32, tf32=True) == 1e12 * RATED_TFLOPS["V100"]["fp32"]


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10G"])
def test_the_peak_of_other_gpus_and_of_parts_of_one_is_unknown(name: str) -> None:
    assert rated_peak(name, torch.float16, tf32=True) is None


def test_a_gpu_without_bfloat16_has_no_peak_for_it() -> None:
    assert rated_peak("Tesla V100-SXM2-32GB", torch.bfloat16, tf32=True) is None


@pytest.mark.parametrize("peaks", RATED_TFLOPS.values(), ids=RATED_TFLOPS)
def test_tensor_cores_multiply_tf32_at_half_the_rate_of_16_bit_numbers(peaks: dict[str, float]) -> None:
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"] > peaks["fp32"]
    assert peaks.get("tf32", peaks["fp16"] / 2) == pytest.approx(peaks["fp16"] / 2, rel=0.02)


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
