"""Step times: the time of a training step by phase, the images per second, the utilization."""

import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_trainer.distributed.waiting import waiting
from ddp_trainer.observers.utilization import utilization_per_rate
from ddp_trainer.training.phase import OWN_WORK, TAGS, Phase
from ddp_trainer.training.run import Observer, TrainingRun


class Instant(NamedTuple):
    """A time: the clock of the host, the CPU time of the thread, and on a GPU a stream's event."""

    clock: float
    on_processor: float
    event: torch.cuda.Event | None


class StepTimer:
    """The time of a log window by phase, by the host's clock on a CPU and by events on a GPU.

    Communication is the part that does not overlap with computing. For DDP, this is the time from
    the last gradient to the end of backward; for a strategy that communicates after backward, it is
    the whole time of communication.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.is_cuda = device.type == "cuda"
        self.rates: list[float] = []
        """Images per second of each window so far, over all ranks."""
        # Backward goes from a model's end to its beginning, so that the gradient of the first
        # parameter is ready last. Frozen parameters have none.
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
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
        """End the current phase and begin `phase`. A step begins when its batch has arrived."""
        if phase is Phase.between_steps and self.begins[-1][0] is Phase.data:
            self.steps += 1
        if self.ready is not None:  # set by the last backward in the phase that ends now
            self.begins.append((Phase.gradient_sync, self.ready))
        self.begins.append((phase, self._now()))
        self.ready = None

    def own_times(self) -> list[list[float]]:
        """Return the times of `OWN_WORK` of each step, then the off-processor part of each.

        The times are in seconds. The off-processor part is that in which this thread ran on no
        core: it waited, was stopped, or another thread used the core. On a GPU this part is 0, and
        this call waits for the device. A step begins with its data phase.
        """
        self.enter(Phase.control_point)
        steps: list[list[float]] = []
        for (phase, start), (_, end) in pairwise(self.begins):
            if phase is Phase.data or not steps:
                steps.append([0.0] * 2 * len(OWN_WORK))
            if phase in OWN_WORK:
                place = OWN_WORK.index(phase)
                steps[-1][place] += elapsed(start, end)
                steps[-1][len(OWN_WORK) + place] += off_processor(start, end)
        return steps[-self.steps :] if self.steps else []

    def close_window(self, images_per_step: int) -> dict[str, float]:
        """Return the values of the window by tag, and begin the next. On a GPU this waits for it.

        images_per_step: how many images all ranks together have in a step.
        """
        self.enter(Phase.control_point)
        seconds = elapsed(self.begins[0][1], self.begins[-1][1])
        spent = dict.fromkeys(TAGS, 0.0)
        for (phase, start), (_, end) in pairwise(self.begins):
            spent[phase.tag] += elapsed(start, end)
        self.rates.append(self.steps * images_per_step / seconds)
        values = {
            "throughput/images_per_second": self.rates[-1],
            "time/step_ms": 1e3 * seconds / self.steps,
        }
        for tag, phase_seconds in spent.items():
            values[f"time/{tag}_ms"] = 1e3 * phase_seconds / self.steps
            values[f"time/{tag}_fraction"] = phase_seconds / seconds
        self.restart()
        return values

    def median_rate(self) -> float | None:
        """Return the median over windows of the images per second; None before the first ends."""
        return statistics.median(self.rates) if self.rates else None

    def _now(self) -> Instant:
        event = torch.cuda.Event(enable_timing=True) if self.is_cuda else None
        if event is not None:
            event.record()
        return Instant(time.perf_counter(), time.thread_time(), event)

    def _gradients_ready(self, _parameter: Tensor) -> None:
        self.ready = self._now()


class StepTimes(Observer):
    """Logs the images per second, the time of a step by phase, and the utilization."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.utilization: dict[str, float] = {}
        """The utilization by name at one image per second over all ranks."""

    def on_start(self, run: TrainingRun) -> None:
        step = run.train_step
        per_device = utilization_per_rate(
            step.model,
            run.loaders.datasets.image_shape,
            device=run.world.device,
            dtype=step.settings.autocast_dtype,
        )
        num_devices = run.world.world_size * step.sync.num_devices
        self.utilization = {name: value / num_devices for name, value in per_device.items()}

    def on_epoch(self, run: TrainingRun) -> None:
        self.timer.restart()  # evaluation and saving are not part of a step

    def on_phase(self, run: TrainingRun, phase: Phase) -> None:
        self.timer.enter(phase)

    def on_log(self, run: TrainingRun) -> None:
        run.log(self.timer.close_window(run.config.global_batch_size))
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


def elapsed(start: Instant, end: Instant) -> float:
    """Return the seconds from `start` to `end`; on a GPU, wait for it, and count its seconds."""
    if start.event is None or end.event is None:
        return end.clock - start.clock
    with waiting():  # the stream may be in a collective
        end.event.synchronize()
    return start.event.elapsed_time(end.event) / 1e3


def off_processor(start: Instant, end: Instant) -> float:
    """Return the seconds in which this thread ran on no core; 0 when training on a GPU."""
    if start.event is not None:
        return 0.0
    return max(0.0, end.clock - start.clock - (end.on_processor - start.on_processor))
