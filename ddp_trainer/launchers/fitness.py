"""Measures the speed of this node: a matrix product, and the copy of a large tensor in memory."""

import sys
import time
from collections.abc import Callable

import torch

from ddp_trainer.timing import synchronize

MATMUL = "matrix product"
BANDWIDTH = "memory bandwidth"
UNITS = {MATMUL: "GFLOP/s", BANDWIDTH: "GB/s"}
SECONDS = 3.0
"""Duration of each measurement; it is long enough to show slowdowns by heat or other programs."""


def measure_fitness(device: torch.device, *, num_threads: int) -> dict[str, float]:
    """Return two speeds of `device`: GFLOP/s of a float32 matrix product, and GB/s of a copy.

    The GB/s count the bytes that are read and the bytes that are written.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    size, length = (8192, 2**26) if device.type == "cuda" else (1024, 2**25)
    left, right, product = (torch.rand(size, size, device=device) for _ in range(3))
    source, target = (torch.rand(length, device=device) for _ in range(2))
    products = calls_per_second(lambda: torch.mm(left, right, out=product), device)
    copies = calls_per_second(lambda: target.copy_(source), device)
    torch.set_num_threads(before)
    bytes_per_copy = 2 * 4 * length  # each float32 is read and written
    return {MATMUL: 2 * size**3 * products / 1e9, BANDWIDTH: bytes_per_copy * copies / 1e9}


def calls_per_second(function: Callable[[], object], device: torch.device) -> float:
    """Return the calls of ``function()`` per second, measured for `SECONDS` after a first call."""
    function()
    synchronize(device)
    began = time.perf_counter()
    count = 0
    seconds = 0.0
    while seconds < SECONDS:
        function()
        synchronize(device)
        count += 1
        seconds = time.perf_counter() - began
    return count / seconds


def measure_node(*, num_threads: int, use_gpus: bool) -> dict[str, float]:
    """Print and return this node's speeds by name: the lowest over its GPUs, or else its CPU's."""
    num_gpus = torch.cuda.device_count() if use_gpus else 0
    devices = [torch.device("cuda", number) for number in range(num_gpus)] or [torch.device("cpu")]
    rates = [measure_fitness(device, num_threads=num_threads) for device in devices]
    speeds = {name: min(rate[name] for rate in rates) for name in UNITS}
    text = ", ".join(f"{name} {speed:,.1f} {UNITS[name]}" for name, speed in speeds.items())
    print(f"fitness of this node: {text}", file=sys.stderr, flush=True)
    return speeds
