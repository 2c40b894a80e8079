"""Control points: the steps after which all ranks decide together whether to log, to save and to
stop.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer.config.schema import CheckpointConfig
from ddp_trainer.distributed.process_group import World
from ddp_trainer.training.metrics import MetricSums, NonFinite

CONTROL_SECONDS = 1.0
"""The approximate time between control points, which is at least one step. Every log point is a
control point too.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The actions of all ranks after a control point (a step at which they decide together): log,
    save, stop.
    """

    log: bool
    save: bool
    stop: bool
    diverged: bool
    """Whether a loss or gradient of any rank has been infinite or NaN in this launch."""
    has_bad_samples: bool
    """Whether any rank could not read a sample since the last control point."""
    loss: float
    """The mean loss of an image, over all ranks and the steps since the last log point."""
    top1: float
    by_rank: Tensor
    """float64 [W, n]: row r has the n numbers of rank r from `own_report`; n is 0 if this is not a
    log point.
    """


class ControlPoint:
    """Decides after which optimizer steps to log, save and stop. All ranks get the same decision.

    Ranks decide together only after some steps, called control points. There, one all-reduce
    exchanges requests to save and stop, sums of losses and correct predictions, and reports of the
    ranks, and the host waits for the device. After other steps, this class neither communicates nor
    waits.
    """

    def __init__(
        self,
        world: World,
        *,
        log_every_steps: int,
        checkpoint: CheckpointConfig,
        should_stop: Callable[[], bool],
    ) -> None:
        self.world = world
        self.log_every_steps = log_every_steps
        self.checkpoint = checkpoint
        self.should_stop = should_stop
        self.next_step = 0
        self.step_seconds = CONTROL_SECONDS
        self.last_step = 0
        self.last_time = time.perf_counter()
        self.saved_at = time.perf_counter()
        self.is_save_postponed = False

    def begin(self, step: int) -> None:
        """Begin or resume an epoch after `step` optimizer steps; `decide` returns a decision after
        the next step.
        """
        self.next_step = step
        self.last_step = step
        self.last_time = time.perf_counter()

    def saved(self) -> None:
        """Record that a checkpoint was saved: ``checkpoint.every_seconds`` is counted from now."""
        self.saved_at = time.perf_counter()
        self.is_save_postponed = False

    def postpone_save(self, step: int) -> None:
        """Postpone a save to the next step, because parameters differ between ranks after optimizer
        step `step`.
        """
        self.is_save_postponed = True
        self.next_step = step + 1

    def decide(
        self,
        step: int,
        *,
        is_last: bool,
        sums: MetricSums,
        nonfinite: NonFinite,
        num_bad_samples: int = 0,
        own_report: Callable[[], list[float]] = list,
    ) -> Decision | None:
        """Return what all ranks do after optimizer step `step`; None if they do not decide together
        after this step.

        is_last: whether the epoch or the launch ends after this step. num_bad_samples: how many
        samples this rank could not read since the last decision. own_report: returns this rank's
        numbers to log, as many as other ranks'.
        """
        every = self.checkpoint.every_steps
        log = is_last or step % self.log_every_steps == 0
        save = self.is_save_postponed or (every is not None and step % every == 0)
        if not (log or save or step >= self.next_step):
            return None
        own = own_report() if log else []
        reports = torch.zeros(self.world.world_size, len(own), dtype=torch.float64)
        reports[self.world.rank] = torch.tensor(own)
        every_seconds = self.checkpoint.every_seconds
        stop = self.should_stop()
        is_time_to_save = (
            every_seconds is not None and time.perf_counter() - self.saved_at >= every_seconds
        )
        of_main = [is_time_to_save, self.step_seconds] if self.world.is_main else [0.0, 0.0]
        flags = torch.tensor([stop, *of_main, num_bad_samples], dtype=torch.float64)
        local = torch.cat([flags, reports.view(-1)]).to(self.world.device, non_blocking=True)
        total = self.world.all_reduce(torch.cat([nonfinite.flag, sums.vector, local])).cpu()
        diverged, loss, correct, count, stops, save_now, step_seconds, num_bad = total[:8].tolist()
        now = time.perf_counter()  # the device has finished, because .cpu() waits for it
        self.step_seconds = (now - self.last_time) / max(1, step - self.last_step)
        self.last_time = now
        self.last_step = step
        self.next_step = step + max(1, int(CONTROL_SECONDS / step_seconds))
        return Decision(
            log=log,
            save=save or save_now > 0,
            stop=stops > 0,
            diverged=diverged > 0,
            has_bad_samples=num_bad > 0,
            loss=loss / max(1, count),
            top1=correct / max(1, count),
            by_rank=total[8:].view_as(reports),
        )
