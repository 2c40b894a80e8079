"""Utilization: the operations per second of the training, divided by those of the hardware.

With the rated peak of the GPU as divisor, this is the model FLOPs utilization (MFU). With the
measured speed of a matrix product on the same GPU or CPU, it is called matmul utilization here.

Source: Chowdhery et al., PaLM, 2022 (arXiv 2204.02311), appendix B.
"""

import copy
import logging

import torch
from torch import nn

from ddp_trainer.distributed.world import World
from ddp_trainer.timing import median_seconds

logger = logging.getLogger(__name__)

_MEASURED: dict[torch.dtype, float] = {}
"""The results of `measure_matmul` that this process knows, by dtype."""

RATED_TFLOPS = {
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
"""The dense peaks for 16-bit and for float32 numbers in the data sheets, in 10^12 operations per
second, for GPUs that have bfloat16 and TF32.

Where a data sheet gives only the peak with sparsity, half of it is listed here. The first entry
whose words are all in the name of a GPU, such as NVIDIA A100-SXM4-80GB, is the entry of that GPU.
"""


def utilization_per_rate(
    model: nn.Module, image_shape: tuple[int, ...], *, world: World, dtype: torch.dtype | None
) -> dict[str, float]:
    """Return ``matmul_utilization`` and ``mfu`` of a device that trains one image per second.

    A name is left out if its value is unknown. Collective: the ranks measure a matrix product at
    the same time, because its speed depends on the load by other ranks of the host. A rank that
    joins a training measures nothing, because the others would wait for it.
    """
    device = world.device
    dtype = dtype or torch.float32
    measured = world.all_gather_object(_MEASURED.get(dtype))
    matmul = next(filter(None, measured), None) or measure_matmul(device, dtype)
    _MEASURED[dtype] = matmul
    try:
        flops = training_flops(model, image_shape)
    # The model of a plug-in may raise anything on the meta device, where tensors have no values.
    except Exception as error:
        reason = str(error).partition("\n")[0]
        logger.info(
            "utilization is unknown: the operations of the model cannot be counted (%s)", reason
        )
        return {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = {
        "matmul_utilization": matmul,
        "mfu": rated_peak(name, dtype, tf32=torch.backends.cudnn.allow_tf32),
    }
    return {name: flops / peak for name, peak in peaks.items() if peak is not None}


def rated_peak(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Return the rated operations per second of a GPU; None if unknown, or for a MIG instance.

    With `tf32`, the rate for float32 is that of TF32, half the rate of 16 bits, because cuDNN then
    computes convolutions of float32 tensors in TF32 (its default).
    """
    words = set(name.upper().replace("-", " ").split())
    gpu = next((gpu for gpu in RATED_TFLOPS if words.issuperset(gpu.split())), None)
    if gpu is None or "MIG" in words:
        return None
    half, single = RATED_TFLOPS[gpu]
    if dtype is torch.float32:
        return 1e12 * (half / 2 if tf32 else single)
    return 1e12 * half


def training_flops(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """Return the operations of forward and backward per image; a multiply-add counts as two."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton if it is installed

    twin = copy.deepcopy(model).to("meta")  # shapes without values
    images = torch.empty(2, *image_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        twin.forward(images).sum().backward()  # not `twin(images)`, which may be compiled
    return counter.get_total_flops() / len(images)


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured operations per second of a matrix product, the median of five.

    A float32 product uses TF32 if cuDNN may use it for convolutions.
    """
    # many CPUs are slow in 16 bits
    size = 8192 if device.type == "cuda" else 1024 if dtype is torch.float32 else 256
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products = torch.backends.cuda.matmul
    was_allowed = products.allow_tf32
    products.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        seconds = median_seconds(lambda: torch.mm(left, right), device, times=5, warmup=1)
    finally:
        products.allow_tf32 = was_allowed
    return 2 * size**3 / seconds
