"""The time of a training step by phase, and the time of any function, including the work that it
starts on a GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.waiting import waiting

T = TypeVar("T")

PHASES = {
    "data": "data_wait",
    "forward": "forward_backward",
    "backward": "forward_backward",
    "gradient sync": "communication",
    "optimizer": "optimizer",
    "between steps": "other",
    "control point": "other",
    "check": "other",
}
"""The phases of a step, with the names that they have in tags."""
OWN_PHASES = ("data", "forward", "backward", "optimizer", "between steps")
"""The phases in which a rank does not wait for others."""


class Instant(NamedTuple):
    """A time: the clock of the host, the CPU time of the thread, and on a GPU an event of the
    stream.
    """

    clock: float
    on_processor: float
    event: torch.cuda.Event | None


class StepTimer:
    """The time of a log window by phase, from the host's clock on a CPU and from events of the
    stream on a GPU.

    Communication is the part that does not overlap with computing. For DDP, this is the time from
    the last gradient to the end of backward; for a strategy that communicates after backward, it is
    the whole time of communication.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.is_cuda = device.type == "cuda"
        self.rates: list[float] = []
        """Images per second of each window so far, over all ranks."""
        # The gradient of the first parameter is ready last, because backward goes from a model's
        # end to its beginning. Frozen parameters have none.
        first = next(
            (parameter for parameter in model.parameters() if parameter.requires_grad), None
        )
        if first is not None:
            first.register_post_accumulate_grad_hook(self._gradients_ready)
        self.restart()

    def restart(self) -> None:
        """Begin a new window. The steps of the old window are dropped: `own_times` does not return
        them any more.
        """
        self.steps = 0
        self.begins: list[tuple[str, Instant]] = [("between steps", self._now())]
        self.ready: Instant | None = None

    def enter(self, phase: str) -> None:
        """End the current phase and begin `phase`, one of `PHASES`."""
        if self.ready is not None:  # set by the last backward in the phase that ends now
            self.begins.append(("gradient sync", self.ready))
        self.begins.append((phase, self._now()))
        self.ready = None

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield from `batches`; the time until each batch is there counts as the data phase."""
        self.enter("data")
        for batch in batches:
            self.enter("between steps")
            self.steps += 1
            yield batch
            self.enter("data")

    def own_times(self) -> list[list[float]]:
        """Return for each step of the window the seconds of each of `OWN_PHASES`, then the
        off-processor part of each.

        The off-processor part is the seconds in which this thread ran on no core: it waited, was
        stopped, or another thread used the core. On a GPU this part is 0, and this call waits for
        the device. A step begins with its data phase.
        """
        self.enter("control point")
        steps: list[list[float]] = []
        for (phase, start), (_, end) in pairwise(self.begins):
            if phase == "data" or not steps:
                steps.append([0.0] * 2 * len(OWN_PHASES))
            if phase in OWN_PHASES:
                place = OWN_PHASES.index(phase)
                steps[-1][place] += elapsed(start, end)
                steps[-1][len(OWN_PHASES) + place] += off_processor(start, end)
        return steps[-self.steps :] if self.steps else []

    def close_window(self, images_per_step: int) -> dict[str, float]:
        """Return the values of the window by tag, and begin the next window. On a GPU this waits
        for the device.

        images_per_step: how many images all ranks together have in a step.
        """
        self.enter("between steps")
        seconds = elapsed(self.begins[0][1], self.begins[-1][1])
        spent = dict.fromkeys(PHASES.values(), 0.0)
        for (phase, start), (_, end) in pairwise(self.begins):
            spent[PHASES[phase]] += elapsed(start, end)
        self.rates.append(self.steps * images_per_step / seconds)
        tags = {
            "throughput/images_per_second": self.rates[-1],
            "time/step_ms": 1e3 * seconds / self.steps,
        }
        for name, phase_seconds in spent.items():
            tags[f"time/{name}_ms"] = 1e3 * phase_seconds / self.steps
            tags[f"time/{name}_fraction"] = phase_seconds / seconds
        self.restart()
        return tags

    def median_rate(self) -> float | None:
        """Return the median over windows of the images per second of all ranks together; None
        before the first ends.
        """
        return statistics.median(self.rates) if self.rates else None

    def _now(self) -> Instant:
        event = torch.cuda.Event(enable_timing=True) if self.is_cuda else None
        if event is not None:
            event.record()
        return Instant(time.perf_counter(), time.thread_time(), event)

    def _gradients_ready(self, _parameter: Tensor) -> None:
        self.ready = self._now()


def elapsed(start: Instant, end: Instant) -> float:
    """Return the seconds from `start` to `end`; on a GPU, wait for the device and return the
    seconds on it.
    """
    if start.event is None or end.event is None:
        return end.clock - start.clock
    with waiting():  # the stream may be in a collective
        end.event.synchronize()
    return start.event.elapsed_time(end.event) / 1e3


def off_processor(start: Instant, end: Instant) -> float:
    """Return the seconds from `start` to `end` in which this thread ran on no core; 0 when training
    on a GPU.
    """
    return (
        max(0.0, end.clock - start.clock - (end.on_processor - start.on_processor))
        if start.event is None
        else 0.0
    )


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
