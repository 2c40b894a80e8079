"""The time of a function, including the work that it starts on a GPU."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(
    function: Callable[[], Any], device: torch.device, *, times: int = 15, warmup: int = 3
) -> float:
    """Return the median seconds of `times` calls of ``function()``, after `warmup` calls."""
    seconds = []
    for _ in range(warmup + times):
        synchronize(device)
        began = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[warmup:])


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work; on a CPU, return at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
