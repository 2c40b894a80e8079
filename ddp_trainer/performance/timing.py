"""The time of function calls, with the work that they start on a GPU."""

import time
from collections.abc import Callable
from typing import Any

import torch


def call_seconds(function: Callable[[], Any], device: torch.device, *, times: int, warmup: int = 3) -> list[float]:
    """Return the seconds of each of `times` calls of ``function()``, after `warmup` calls."""
    seconds = []
    for _ in range(warmup + times):
        synchronize(device)
        began = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[warmup:]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
