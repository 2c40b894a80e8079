"""Model FLOPs utilisation: the arithmetic of a model over what this hardware multiplies at best.

Source: Chowdhery et al., PaLM, 2022 (arXiv 2204.02311), appendix B, with a measured peak in place of the maker's.
"""

from __future__ import annotations

import copy
import time
from functools import cache, cached_property

import torch
from torch import nn


class Utilisation:
    """What share of a rank's peak its training uses. Nothing is counted or measured before it is asked for."""

    def __init__(
        self, model: nn.Module, image_shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self.model, self.image_shape, self.device, self.dtype = model, image_shape, device, dtype or torch.float32

    @cached_property
    def flops_per_image(self) -> float:
        """Floating-point operations of forward and backward for an image, by shapes alone."""
        return training_flops(self.model, self.image_shape)

    @cached_property
    def peak(self) -> float:
        """Operations per second of a matrix product on this rank, all ranks being as busy as it."""
        tf32 = torch.backends.cudnn.allow_tf32
        return matmul_peak(self.device, self.dtype, tf32=tf32, num_threads=torch.get_num_threads())

    def at(self, images_per_second: float) -> float:
        """Return the utilisation of a rank that trains on `images_per_second`."""
        return images_per_second * self.flops_per_image / self.peak


def training_flops(model: nn.Module, image_shape: tuple[int, ...]) -> float:
    """Return the operations of forward and backward for an image [C, H, W]; a product with its sum counts as two."""
    from torch.utils.flop_counter import FlopCounterMode  # not at the start of every launch

    twin = copy.deepcopy(model).to("meta")  # computes nothing
    images = torch.empty(2, *image_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        twin.forward(images).sum().backward()  # not what compile made of it
    return counter.get_total_flops() / len(images)


@cache  # a sweep asks for each of its runs
def matmul_peak(device: torch.device, dtype: torch.dtype, *, tf32: bool, num_threads: int) -> float:
    """Return the operations per second of the best of some matrix products, those of fp32 in TF32 if `tf32`.

    `num_threads` is what torch uses at the moment of the call; what was measured with other threads is not given back.
    """
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best, products = float("inf"), torch.backends.cuda.matmul
    was_allowed, products.allow_tf32 = products.allow_tf32, tf32
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        torch.mm(left, right)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    products.allow_tf32 = was_allowed
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
