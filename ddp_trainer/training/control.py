"""Control points: the steps after which all ranks decide together whether to log, save or stop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer.distributed.world import World, waiting
from ddp_trainer.training.metrics import NonFinite

CONTROL_SECONDS = 1.0
"""The approximate time between two control points, which are at least one step apart.

Other control points are log points, the steps of `save_every_steps`, and the first and the last
step of an epoch or a launch.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """The requests of this rank at a control point."""

    stop: bool = False
    """Whether a signal or the stop file asks for a graceful stop."""
    requested_stop: bool = False
    """Whether an observer has called `request_stop`."""
    save: bool = False
    join: bool = False
    """Whether a process waits to join the process group."""
    bad_samples: int = 0
    """Number of samples that this rank could not read since the last control point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision at a control point, equal on all ranks: whether to log, to save and to stop."""

    log: bool
    save: bool
    join: bool
    """Whether a process waits to join the process group."""
    stop: bool
    requested_stop: bool
    diverged: bool
    """Whether a loss or gradient of any rank has been infinite or NaN in this launch."""
    has_bad_samples: bool
    """Whether any rank could not read a sample since the last control point."""
    loss: float
    """The mean loss per image, over all ranks and over the steps since the last log point."""
    top1: float
    skipped_updates: float
    """Number of updates skipped since the last log point; with local SGD, the mean over ranks."""
    by_rank: Tensor
    """float64 [world size, n]: row r has the numbers of rank r; n is 0 except at log points."""


class ControlPoint:
    """Decides after which optimizer steps to log, save and stop. All ranks get the same decision.

    Ranks communicate only after some steps, called control points. At a control point, one
    all-reduce sums the requests, the losses, the numbers of correct predictions and the results of
    `rank_values`, and the host waits for the device. At log points, the host may also wait for the
    device in `rank_values`. After other steps, this class neither communicates nor waits.
    """

    def __init__(
        self,
        world: World,
        *,
        log_every_steps: int,
        save_every_steps: int | None,
        save_every_seconds: float | None,
    ) -> None:
        """save_every_seconds: measured by the clock of rank 0; None: time never causes a save."""
        self.world = world
        self.log_every_steps = log_every_steps
        self.save_every_steps = save_every_steps
        self.save_every_seconds = save_every_seconds
        self.step_seconds = CONTROL_SECONDS
        self.saved_at = time.perf_counter()
        self.is_save_postponed = False

    def begin(self, step: int) -> None:
        """Prepare for the steps of an epoch after step `step`; the first is a control point."""
        self.next_step = step + 1
        self.last_step = step
        self.last_time = time.perf_counter()

    def next_after(self, step: int) -> int:
        """Return the first control point after `step`, unless an epoch or a launch ends earlier."""
        every = (self.log_every_steps, self.save_every_steps or self.log_every_steps)
        return max(step + 1, min(self.next_step, *(step - step % n + n for n in every)))

    def saved(self) -> None:
        """Record that a checkpoint was saved, so that `save_every_seconds` counts from now."""
        self.saved_at = time.perf_counter()
        self.is_save_postponed = False

    def postpone_save(self, step: int) -> None:
        """Postpone a save to the next step, because parameters differ between ranks now."""
        self.is_save_postponed = True
        self.next_step = step + 1

    def decide(
        self,
        step: int,
        *,
        is_last: bool,
        sums: Tensor,
        nonfinite: NonFinite,
        requests: Requests,
        rank_values: Callable[[], Sequence[float]],
    ) -> Decision | None:
        """Return all ranks' decision after optimizer step `step`; None if it is no control point.

        Collective: every rank must call this after each step.

        is_last: whether the epoch or the launch ends after this step. sums: this rank's part of the
        `MetricSums`. rank_values: a function that returns this rank's numbers for
        `Decision.by_rank`, equally many on all ranks; it is called at log points only.
        """
        log = is_last or step % self.log_every_steps == 0
        every = self.save_every_steps
        save = self.is_save_postponed or (every is not None and step % every == 0)
        if not (log or save or step >= self.next_step):
            return None

        own = rank_values() if log else ()
        metrics = torch.cat([nonfinite.flag, sums])
        totals, flags, by_rank = self.reduce(metrics, self.flags(requests), own)
        self.plan_next(step, step_seconds=flags["step_seconds"])
        diverged, loss, correct, count, skipped = totals
        return Decision(
            log=log,
            save=save or flags["save"] > 0,
            join=flags["join"] > 0,
            stop=flags["stop"] > 0,
            requested_stop=flags["requested_stop"] > 0,
            diverged=diverged > 0,
            has_bad_samples=flags["bad_samples"] > 0,
            loss=loss / max(1, count),
            top1=correct / max(1, count),
            skipped_updates=skipped / self.world.world_size,
            by_rank=by_rank,
        )

    def flags(self, requests: Requests) -> dict[str, float]:
        """Return this rank's requests as numbers by name, which `reduce` sums over all ranks.

        The step time is 0 except on rank 0, so that the sum is the step time of rank 0.
        """
        seconds = self.save_every_seconds
        elapsed = time.perf_counter() - self.saved_at
        is_time_to_save = seconds is not None and elapsed >= seconds
        return {
            "stop": requests.stop,
            "requested_stop": requests.requested_stop,
            "save": requests.save or (self.world.is_main and is_time_to_save),
            "join": requests.join,
            "step_seconds": self.step_seconds if self.world.is_main else 0.0,
            "bad_samples": requests.bad_samples,
        }

    def reduce(
        self, metrics: Tensor, flags: dict[str, float], own: Sequence[float]
    ) -> tuple[list[float], dict[str, float], Tensor]:
        """Sum all numbers over ranks in one all-reduce, and wait for the device. Collective.

        metrics: float64 [m], on the device. own: n numbers of this rank. Returns the sums of
        `metrics`, the sums of `flags` by name, and a table whose row r is `own` of rank r, float64
        [world size, n] on the CPU.
        """
        table = torch.zeros(self.world.world_size, len(own), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(own, dtype=torch.float64)
        local = torch.cat([torch.tensor([*flags.values()], dtype=torch.float64), table.view(-1)])
        local = local.to(self.world.device, non_blocking=True)
        total = self.world.all_reduce(torch.cat([metrics, local]))
        with waiting():  # because with NCCL, the host waits here, and not in all_reduce
            total = total.cpu()
        sums, summed_flags, by_rank = total.split([len(metrics), len(flags), table.numel()])
        by_name = dict(zip(flags, summed_flags.tolist(), strict=True))
        return sums.tolist(), by_name, by_rank.view_as(table)

    def plan_next(self, step: int, *, step_seconds: float) -> None:
        """Set the next control point, about `CONTROL_SECONDS` later; measure the steps up to now.

        step_seconds: the mean time of a step, which rank 0 measured up to the previous control
        point. It must be equal on all ranks, because all ranks need the same next control point.
        """
        self.next_step = step + max(1, int(CONTROL_SECONDS / step_seconds))
        # The device has finished the steps up to `step`, so their time is known now.
        now = time.perf_counter()
        self.step_seconds = (now - self.last_time) / max(1, step - self.last_step)
        self.last_time = now
        self.last_step = step
