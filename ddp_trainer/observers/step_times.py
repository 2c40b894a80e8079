"""Step times: the time of a training step by phase, the images per second, the utilization."""

import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.world import waiting
from ddp_trainer.observers.utilization import utilization_per_rate
from ddp_trainer.training.phase import OWN_WORK, TAGS, Phase
from ddp_trainer.training.run import Observer, TrainingRun


class Instant(NamedTuple):
    """A point in time: the host's clock and the thread's CPU time in seconds, and a CUDA event."""

    clock: float
    on_processor: float
    event: torch.cuda.Event | None


class StepTimer:
    """Measures the time of a log window by phase: by the host's clock, or by events on a GPU.

    The time of communication is only the part that does not overlap with computation. For DDP, it
    is the time from the last gradient to the end of backward; for a strategy that communicates
    after backward, it is the whole time of communication.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.is_cuda = device.type == "cuda"
        self.rates: list[float] = []
        """Images per second of each window so far, over all ranks."""
        # Backward goes from a model's end to its beginning, so that the gradient of the first
        # parameter is ready last. Frozen parameters, and those of other ranks, have no gradient.
        trained = (p for p in model.parameters() if p.requires_grad and p.numel())
        first = next(trained, None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._gradients_ready)
        self.restart()

    def restart(self) -> None:
        """Begin a new window; `own_times` no longer returns the steps of the old one."""
        self.steps = 0
        self.begins: list[tuple[Phase, Instant]] = [(Phase.between_steps, self._now())]
        self.ready: Instant | None = None

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`; a step is counted when its batch has arrived."""
        if phase is Phase.between_steps and self.begins[-1][0] is Phase.data:
            self.steps += 1
        if self.ready is not None:  # set by the last backward in the phase that ends now
            self.begins.append((Phase.gradient_sync, self.ready))
        self.begins.append((phase, self._now()))
        self.ready = None

    def own_times(self) -> list[list[float]]:
        """Return for each step the seconds in each phase of `OWN_WORK`, then their idle parts.

        The idle part is the time in which this thread ran on no core: it waited, was stopped, or
        another thread used the core. On a GPU the idle part is 0, and this call waits for the
        device. A step begins with its data phase.
        """
        steps: list[list[float]] = []
        for phase, seconds, idle in self._spans():
            if phase is Phase.data or not steps:
                steps.append([0.0] * 2 * len(OWN_WORK))
            if phase in OWN_WORK:
                place = OWN_WORK.index(phase)
                steps[-1][place] += seconds
                steps[-1][len(OWN_WORK) + place] += idle
        return steps[-self.steps :] if self.steps else [[0.0] * 2 * len(OWN_WORK)]

    def close_window(self, images: int) -> dict[str, float]:
        """Return the log values of the window by tag, and begin the next window.

        images: the number of images that all ranks have trained on in the window. On a GPU, this
        call waits for the device. The window must have at least one step.
        """
        spent = dict.fromkeys(TAGS, 0.0)
        for phase, seconds, _ in self._spans():
            spent[phase.tag] += seconds
        total = sum(spent.values())
        self.rates.append(images / total)
        values = {
            "throughput/images_per_second": self.rates[-1],
            "time/step_ms": 1e3 * total / self.steps,
        }
        for tag, seconds in spent.items():
            values[f"time/{tag}_ms"] = 1e3 * seconds / self.steps
            values[f"time/{tag}_fraction"] = seconds / total
        self.restart()
        return values

    def median_rate(self) -> float | None:
        """Return the median of `rates`, images per second; None before the first window ends."""
        return statistics.median(self.rates) if self.rates else None

    def _spans(self) -> Iterator[tuple[Phase, float, float]]:
        """End the current phase; yield each interval between two phase changes of the window.

        An interval is its phase, its seconds, and its idle seconds, in which this thread ran on no
        core. On a GPU, idle seconds are 0, and this call waits for the device.
        """
        self.enter(Phase.control_point)
        for (phase, start), (_, end) in pairwise(self.begins):
            seconds = end.clock - start.clock
            idle = max(0.0, seconds - (end.on_processor - start.on_processor))
            if start.event is not None and end.event is not None:
                with waiting():  # the stream may be in a collective
                    end.event.synchronize()
                seconds = start.event.elapsed_time(end.event) / 1e3
                idle = 0.0
            yield phase, seconds, idle

    def _now(self) -> Instant:
        event = torch.cuda.Event(enable_timing=True) if self.is_cuda else None
        if event is not None:
            event.record()
        return Instant(time.perf_counter(), time.thread_time(), event)

    def _gradients_ready(self, _parameter: Tensor) -> None:
        if not (self.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.ready = self._now()


class StepTimes(Observer):
    """Logs the images per second, the time of a step by phase, and the utilization."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.utilization: dict[str, float] = {}
        """The utilization by name, if all ranks together trained one image per second."""
        self.first_step = 0
        """The number of steps before the window of the timer."""

    def on_start(self, run: TrainingRun) -> None:
        step = run.train_step
        per_device = utilization_per_rate(
            step.model,
            run.loaders.datasets.image_shape,
            world=run.world,
            dtype=step.settings.autocast_dtype,
        )
        num_devices = run.world.world_size * step.sync.num_devices
        self.utilization = {name: value / num_devices for name, value in per_device.items()}

    def on_epoch(self, run: TrainingRun) -> None:
        self.timer.restart()  # evaluation and saving are not part of a step
        self.first_step = run.step

    def on_phase(self, run: TrainingRun, phase: Phase) -> None:
        self.timer.enter(phase)

    def on_log(self, run: TrainingRun) -> None:
        if not self.timer.steps:  # ranks that are lost took them, and this rank repeats the log
            return
        images = (run.step - self.first_step) * run.config.global_batch_size
        run.log(self.timer.close_window(images))
        self.first_step = run.step
        rate = self.timer.rates[-1]
        run.log({"throughput/images_per_second_per_rank": rate / run.world.world_size})
        run.log({f"throughput/{name}": rate * value for name, value in self.utilization.items()})

    def summary_values(self, run: TrainingRun) -> Mapping[str, Any]:
        rate = self.timer.median_rate()
        if rate is None:
            return {}
        values = {name: rate * value for name, value in self.utilization.items()}
        seconds = run.steps_per_epoch * run.config.global_batch_size / rate
        return {"images_per_second": rate, "seconds_per_epoch": seconds, **values}
