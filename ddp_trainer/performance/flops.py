"""Utilization: the floating-point operations of the training per second, over those that the hardware can do.

Over the rated peak of a GPU it is model FLOPs utilization (MFU). Over a matrix product measured on the same hardware,
which every processor has, it is called matmul utilization here.

Source: Chowdhery et al., PaLM, 2022 (arXiv 2204.02311), appendix B.
"""

import copy
import logging
from functools import cache, cached_property

import torch
from torch import nn

from ddp_trainer.performance.timing import call_seconds

logger = logging.getLogger(__name__)

RATED_TFLOPS = {
    "V100 PCIE": {"fp16": 112, "fp32": 14},
    "V100": {"fp16": 125, "fp32": 15.7},
    "T4": {"fp16": 65, "fp32": 8.1},
    "A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    "A30": {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3},
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    "L4": {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    "L40S": {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "H100 PCIE": {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    "H100 NVL": {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60},
    "H100": {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
    "H200 NVL": {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60},
    "H200": {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67},
}
"""Dense peak by the data sheets, in 10^12 operations per second; where a sheet gives it with sparsity, half of that.

A GPU is the first entry whose words are all in its name, for example NVIDIA A100-SXM4-80GB.
"""
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Utilization:
    """The share of a device's peak that training uses. Nothing is counted or measured before it is asked for."""

    def __init__(
        self, model: nn.Module, image_shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self.model, self.image_shape, self.device, self.dtype = model, image_shape, device, dtype or torch.float32

    @cached_property
    def flops_per_image(self) -> float | None:
        """Floating-point operations of forward and backward for one image; None if they cannot be counted."""
        try:
            return training_flops(self.model, self.image_shape)
        except Exception as error:  # a model of a plug-in may need values, or a device, and raise anything without
            reason = str(error).partition("\n")[0]
            logger.info("utilization is unknown: the operations of the model cannot be counted (%s)", reason)
            return None

    @cached_property
    def matmul_peak(self) -> float:
        """Operations per second of a matrix product on this device, measured while the other ranks do the same."""
        tf32 = torch.backends.cudnn.allow_tf32
        return measure_matmul(self.device, self.dtype, tf32=tf32, num_threads=torch.get_num_threads())

    @cached_property
    def rated_peak(self) -> float | None:
        """Operations per second by the data sheet; None for a device that is not in `RATED_TFLOPS`."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return rated_peak(name, self.dtype, tf32=torch.backends.cudnn.allow_tf32)

    def of_matmul(self, images_per_second: float) -> float | None:
        """Return the matmul utilization of a device that trains on `images_per_second`; None if it is unknown."""
        return self.flops_per_image and images_per_second * self.flops_per_image / self.matmul_peak

    def mfu(self, images_per_second: float) -> float | None:
        """Return the model FLOPs utilization of such a device; None if it is unknown."""
        if self.flops_per_image is None or self.rated_peak is None:
            return None
        return images_per_second * self.flops_per_image / self.rated_peak


def rated_peak(name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Return the rated operations per second of the GPU called `name`; None if unknown, or if it is a part of a GPU.

    With `tf32` float32 stands for TF32, in which cuDNN computes the convolutions of float32 tensors by default.
    """
    words = set(name.upper().replace("-", " ").split())
    peaks = next((peaks for key, peaks in RATED_TFLOPS.items() if words.issuperset(key.split())), None)
    kind = KINDS[dtype]
    if peaks is None or "MIG" in words or kind not in peaks:
        return None
    return 1e12 * peaks["tf32" if kind == "fp32" and tf32 and "tf32" in peaks else kind]


def training_flops(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """Return the operations of forward and backward for an image [C, H, W]; a multiply-add counts as two."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton where there is one

    twin = copy.deepcopy(model).to("meta")  # shapes without values
    images = torch.empty(2, *image_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        twin.forward(images).sum().backward()  # not the compiled call
    return counter.get_total_flops() / len(images)


@cache  # the runs of a sweep share it
def measure_matmul(device: torch.device, dtype: torch.dtype, *, tf32: bool, num_threads: int) -> float:
    """Return the operations per second of the fastest of some matrix products, those of float32 in TF32 if `tf32`.

    `num_threads`, the number of threads that torch uses now, is part of the cache's key.
    """
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products = torch.backends.cuda.matmul
    was_allowed, products.allow_tf32 = products.allow_tf32, tf32
    fastest = min(call_seconds(lambda: torch.mm(left, right), device, times=4, warmup=1))
    products.allow_tf32 = was_allowed
    return 2 * size**3 / fastest
