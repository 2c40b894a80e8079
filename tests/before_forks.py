"""Imported by the process from which ranks are forked, to make each rank cheaper."""

import gc
import sys

gc.disable()  # it would look again and again at what is imported

sys.modules["wandb"] = None  # type: ignore[assignment]  # which timm would import
import timm  # noqa: E402, F401

del sys.modules["wandb"]

import runs  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.utils.tensorboard  # noqa: E402
from hydra._internal.hydra import Hydra  # noqa: E402

from ddp_trainer.observers import utilization  # noqa: E402
from ddp_trainer.timing import median_seconds  # noqa: E402


def measure_small(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of one small product: each run measures six large ones, of
    which most tests make no use.
    """
    factor = torch.randn(256, 256, device=device, dtype=dtype)
    seconds = median_seconds(lambda: torch.mm(factor, factor), device, times=1, warmup=1)
    return 2 * 256**3 / seconds


utilization.measure_matmul = measure_small
# Hydra composes each config once more for hydra.mode, and takes that from the flags if this fails.
Hydra.get_mode = lambda *_, **__: None
gc.enable()
gc.freeze()  # so that collections in ranks skip what was imported, as in the command line
