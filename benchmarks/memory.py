"""Measure the memory of a rank on a CPU: of parameters, gradients and the optimizer's state.

torchrun --nproc_per_node=4 benchmarks/memory.py sync=fsdp

Prints by how much the memory in use has grown since before the model was built, of the rank with
the largest growth: when the gradients are complete, and there are no activations; and at most, with
the activations of two small images. Memory in use is that of glibc's malloc, without what it keeps
for later (`mallinfo2`).
"""

import ctypes
import sys
from contextlib import ExitStack
from threading import Event, Thread

from torch import Tensor

from ddp_trainer import Config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.start import set_up
from ddp_trainer.tools.step_benchmark import StepRun

WORDS = (
    "model=torchvision",
    "model.arch=resnet50",
    "data=synthetic",
    "data.height=32",
    "data.width=32",
    "device=cpu",
    "precision=fp32",
    "optimizer=adamw",
    "global_batch_size=8",
    "num_threads=1",
)
SECONDS = 0.001
"""The time between two samples of the memory in use."""
NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = MallInfo


def used_mb() -> float:
    """Return the memory in use by this process, in 10^6 bytes."""
    info = libc.mallinfo2()
    return 1e-6 * (info.uordblks + info.hblkhd)


class AfterBackward:
    """A hook of the step that keeps the memory in use when the gradients are complete."""

    used = 0.0

    def before_forward(self, images: Tensor, labels: Tensor) -> None:
        pass

    def before_optimizer(self, images: Tensor, labels: Tensor) -> None:
        self.used = used_mb()


def sample(samples: list[float], end: Event) -> None:
    """Append the memory in use to `samples` again and again, until `end`."""
    while not end.wait(SECONDS):
        samples.append(used_mb())


def main() -> None:
    config = Config.compose(*WORDS, *sys.argv[1:])
    with ExitStack() as stack:
        setup = set_up(config, read_environment(), stack)
        loaders = setup.build_loaders()
        before = used_mb()
        run = StepRun(setup, loaders)
        hook = AfterBackward()
        run.step.hooks.append(hook)
        run.take_steps(3)
        samples: list[float] = []
        end = Event()
        thread = Thread(target=sample, args=(samples, end))
        thread.start()
        run.take_steps(5)
        end.set()
        thread.join()
        size = 4e-6 * run.step.num_parameters
        own = [hook.used - before, max(samples) - before]
        after_backward, most = map(max, zip(*setup.world.all_gather_object(own), strict=True))
        if setup.world.is_main:
            # ranks of an asynchronous training call no hooks
            after = f"{after_backward:,.0f} MB after backward, " if after_backward > 0 else ""
            print(
                f"sync={config.sync.name}, {setup.world.world_size} ranks, parameters {size:,.0f}"
                f" MB: {after}at most {most:,.0f} MB ({len(samples)} samples)"
            )
        del run  # no DDP module may outlive the process group


if __name__ == "__main__":
    main()
