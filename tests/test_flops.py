"""Model FLOPs utilisation: operations counted by hand, a peak that nothing exceeds, the tag and the summary."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY, read_summary, records
from torch import nn

from ddp_trainer.config import LeNetConfig, ResNet18Config
from ddp_trainer.flops import Utilisation, matmul_peak, training_flops
from ddp_trainer.models import build_model

CPU = torch.device("cpu")


def test_lenets_operations_are_those_counted_by_hand() -> None:
    model = build_model(LeNetConfig(), image_shape=(1, 28, 28), num_classes=10)
    first = 26 * 26 * 20 * 9  # 28×28 less a 3×3 kernel
    second = 9 * 9 * 50 * 20 * 25  # halved to 13×13, less a 5×5 kernel
    dense = 800 * 128 + 128 * 10  # halved to 4×4
    forward = first + second + dense
    backward = 2 * forward - first  # nobody asks for the gradient of the images
    assert training_flops(model, (1, 28, 28)) == 2 * (forward + backward)


def test_counting_changes_nothing() -> None:
    model = build_model(ResNet18Config(), image_shape=(1, 28, 28), num_classes=10)
    before = copy.deepcopy(model.state_dict())
    assert training_flops(model, (1, 28, 28)) > 1e9
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_that_of_the_matrix_product(dtype: torch.dtype) -> None:
    peak = matmul_peak(CPU, dtype, tf32=False, num_threads=torch.get_num_threads())
    left, right = (torch.randn(512, 512, dtype=dtype) for _ in range(2))
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(left, right)
    assert 20 * 2 * 512**3 / (time.perf_counter() - began) < 2 * peak


def test_nothing_is_measured_before_it_is_asked_for() -> None:
    utilisation = Utilisation(nn.Linear(2, 2), (2,), device=CPU, dtype=None)
    assert not {"peak", "flops_per_image"} & vars(utilisation).keys()
    assert utilisation.at(200.0) == 2 * utilisation.at(100.0) > 0


@pytest.mark.parametrize("extra", [(), ("model=resnet18",)])
def test_a_run_tells_its_utilisation(extra: tuple[str, ...], train_in: Callable[..., Path]) -> None:
    run_dir = train_in("run", *TINY, *extra, "log_every_steps=4", "epochs=1", ranks=2)
    assert all(0 < record["throughput/mfu"] < 1.2 for record in records(run_dir, "throughput/mfu"))
    assert 0 < read_summary(run_dir)["mfu"] < 1.2
