"""Utilization: the operations per second of the training, divided by those of the hardware.

Divided by the rated peak of a GPU, it is model FLOPs utilization (MFU). Divided by the speed of a
matrix product that is measured on the same GPU or CPU, it is called matmul utilization here.

Source: Chowdhery et al., PaLM, 2022 (arXiv 2204.02311), appendix B.
"""

import copy
import logging
from functools import cache

import torch
from torch import nn

from ddp_trainer.timing import median_seconds

logger = logging.getLogger(__name__)

RATED_TFLOPS = {
    "V100 PCIE": (112, 14),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
    "A10": (125, 31.2),
    "A30": (165, 10.3),
    "A100": (312, 19.5),
    "L4": (121, 30.3),
    "L40S": (362, 91.6),
    "H100 PCIE": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "H200 NVL": (835, 60),
    "H200": (989, 67),
}
"""Dense peak of 16-bit and of float32 numbers by the data sheets, in 10^12 operations per second.

If a sheet gives the peak with sparsity, it is half of that. A GPU is the first entry whose words
are all in the name of the GPU, for example NVIDIA A100-SXM4-80GB.
"""
BEFORE_AMPERE = ("V100 PCIE", "V100", "T4")
"""GPUs with neither bfloat16 nor TF32; the others multiply TF32 at half the rate of 16 bits."""


def utilization_per_rate(
    model: nn.Module,
    image_shape: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, float]:
    """Return ``matmul_utilization`` and ``mfu`` of a device that trains one image per second.

    A name is left out if its value is unknown. All ranks call this together, because the speed of
    a matrix product depends on what the other ranks of a host do.
    """
    dtype = dtype or torch.float32
    try:
        flops = training_flops(model, image_shape)
    # a plug-in's model may need values, or a device, and raise anything without them
    except Exception as error:
        reason = str(error).partition("\n")[0]
        logger.info(
            "utilization is unknown: the operations of the model cannot be counted (%s)", reason
        )
        return {}
    tf32 = torch.backends.cudnn.allow_tf32
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    num_threads = torch.get_num_threads()
    peaks = {
        "matmul_utilization": measure_matmul(device, dtype, tf32=tf32, num_threads=num_threads),
        "mfu": rated_peak(name, dtype, tf32=tf32),
    }
    return {name: flops / peak for name, peak in peaks.items() if peak is not None}


def rated_peak(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Return the rated operations per second of a GPU; None if unknown, or for a part (MIG).

    With `tf32`, float32 means TF32, because cuDNN by default computes the convolutions of float32
    tensors in TF32.
    """
    words = set(name.upper().replace("-", " ").split())
    gpu = next((gpu for gpu in RATED_TFLOPS if words.issuperset(gpu.split())), None)
    if gpu is None or "MIG" in words or (dtype is torch.bfloat16 and gpu in BEFORE_AMPERE):
        return None
    half, single = RATED_TFLOPS[gpu]
    if dtype is torch.float32:
        return 1e12 * (half / 2 if tf32 and gpu not in BEFORE_AMPERE else single)
    return 1e12 * half


def training_flops(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """Return the operations of forward and backward for an image; a multiply-add counts as two."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton if it is installed

    twin = copy.deepcopy(model).to("meta")  # shapes without values
    images = torch.empty(2, *image_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        twin.forward(images).sum().backward()  # not the compiled call
    return counter.get_total_flops() / len(images)


@cache  # the runs of a sweep share it
def measure_matmul(
    device: torch.device, dtype: torch.dtype, *, tf32: bool, num_threads: int
) -> float:
    """Return the operations per second of a matrix product, the median of five.

    tf32: compute float32 in TF32. num_threads: the number of threads that torch uses now, which is
    part of the cache's key.
    """
    # many CPUs are slow in float16
    size = 8192 if device.type == "cuda" else 256 if dtype is torch.float16 else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products = torch.backends.cuda.matmul
    was_allowed = products.allow_tf32
    products.allow_tf32 = tf32
    seconds = median_seconds(lambda: torch.mm(left, right), device, times=5, warmup=1)
    products.allow_tf32 = was_allowed
    return 2 * size**3 / seconds
