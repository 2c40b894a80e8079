"""Control points: the steps after which all ranks decide together to log, to save and to stop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_trainer.distributed.waiting import waiting
from ddp_trainer.distributed.world import World
from ddp_trainer.training.metrics import MetricSums, NonFinite

CONTROL_SECONDS = 1.0
"""The approximate time between control points, at least one step. Log points are such points."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """The requests of this rank at a control point."""

    stop: bool = False
    """A graceful stop: a signal, or the stop file."""
    requested_stop: bool = False
    """An observer has called `request_stop`."""
    save: bool = False
    bad_samples: int = 0
    """Number of samples that this rank could not read since the last control point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The actions of all ranks after a control point: log, save, stop."""

    log: bool
    save: bool
    stop: bool
    requested_stop: bool
    diverged: bool
    """Whether a loss or gradient of any rank has been infinite or NaN in this launch."""
    has_bad_samples: bool
    """Whether any rank could not read a sample since the last control point."""
    loss: float
    """The mean loss of an image, over all ranks and the steps since the last log point."""
    top1: float
    by_rank: Tensor
    """float64 [W, n]: row r has the numbers of rank r; n is 0 if this is not a log point."""


class ControlPoint:
    """Decides after which optimizer steps to log, save and stop. All ranks get the same decision.

    Ranks decide together only after some steps, called control points. There, one all-reduce
    exchanges requests, sums of losses and correct predictions, and numbers of the ranks, and the
    host waits for the device. After other steps this class neither communicates nor waits.
    """

    def __init__(
        self,
        world: World,
        *,
        log_every_steps: int,
        save_every_steps: int | None,
        save_every_seconds: float | None,
    ) -> None:
        """save_every_seconds: by the clock of rank 0; None: no save by time."""
        self.world = world
        self.log_every_steps = log_every_steps
        self.save_every_steps = save_every_steps
        self.save_every_seconds = save_every_seconds
        self.next_step = 0
        self.step_seconds = CONTROL_SECONDS
        self.last_step = 0
        self.last_time = time.perf_counter()
        self.saved_at = time.perf_counter()
        self.is_save_postponed = False

    def begin(self, step: int) -> None:
        """Begin an epoch after optimizer step `step`; the step after it is a control point."""
        self.next_step = step
        self.last_step = step
        self.last_time = time.perf_counter()

    def saved(self) -> None:
        """Record that a checkpoint was saved: ``checkpoint.every_seconds`` counts from now."""
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
        sums: MetricSums,
        nonfinite: NonFinite,
        requests: Requests,
        rank_values: Callable[[], Sequence[float]],
    ) -> Decision | None:
        """Return what all ranks do after optimizer step `step`; None if it is no control point.

        is_last: whether the epoch or the launch ends after this step. rank_values: called at log
        points; returns this rank's numbers for all ranks, as many as on the other ranks.
        Collective at control points, which are the same on all ranks.
        """
        log = is_last or step % self.log_every_steps == 0
        every = self.save_every_steps
        save = self.is_save_postponed or (every is not None and step % every == 0)
        if not (log or save or step >= self.next_step):
            return None

        own = rank_values() if log else ()
        metrics = torch.cat([nonfinite.flag, sums.vector])
        totals, flags, by_rank = self.reduce(metrics, self.flags(requests), own)
        self.plan_next(step, step_seconds=flags["step_seconds"])
        diverged, loss, correct, count = totals
        return Decision(
            log=log,
            save=save or flags["save"] > 0,
            stop=flags["stop"] > 0,
            requested_stop=flags["requested_stop"] > 0,
            diverged=diverged > 0,
            has_bad_samples=flags["bad_samples"] > 0,
            loss=loss / max(1, count),
            top1=correct / max(1, count),
            by_rank=by_rank,
        )

    def flags(self, requests: Requests) -> dict[str, float]:
        """Return this rank's numbers by name, to be summed over ranks. Only rank 0 sends times."""
        seconds = self.save_every_seconds
        elapsed = time.perf_counter() - self.saved_at
        is_time_to_save = seconds is not None and elapsed >= seconds
        return {
            "stop": requests.stop,
            "requested_stop": requests.requested_stop,
            "save": requests.save or (self.world.is_main and is_time_to_save),
            "step_seconds": self.step_seconds if self.world.is_main else 0.0,
            "bad_samples": requests.bad_samples,
        }

    def reduce(
        self, metrics: Tensor, flags: dict[str, float], own: Sequence[float]
    ) -> tuple[list[float], dict[str, float], Tensor]:
        """Sum all numbers over ranks in one all-reduce, and wait for the device. Collective.

        metrics: float64 [m], on the device. Returns their sums, the sums of `flags`, and the table
        of all ranks' `own` numbers, float64 [W, n] on the CPU.
        """
        table = torch.zeros(self.world.world_size, len(own), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(own, dtype=torch.float64)
        local = torch.cat([torch.tensor([*flags.values()], dtype=torch.float64), table.view(-1)])
        local = local.to(self.world.device, non_blocking=True)
        total = self.world.all_reduce(torch.cat([metrics, local]))
        with waiting():  # with NCCL, the host waits where it reads the result
            total = total.cpu()
        sums, summed_flags, by_rank = total.split([len(metrics), len(flags), table.numel()])
        by_name = dict(zip(flags, summed_flags.tolist(), strict=True))
        return sums.tolist(), by_name, by_rank.view_as(table)

    def plan_next(self, step: int, *, step_seconds: float) -> None:
        """Set the next control point, about `CONTROL_SECONDS` later by rank 0's time of a step.

        The device has finished the steps up to `step`, so their time is known now.
        """
        now = time.perf_counter()
        self.step_seconds = (now - self.last_time) / max(1, step - self.last_step)
        self.last_time = now
        self.last_step = step
        self.next_step = step + max(1, int(CONTROL_SECONDS / step_seconds))
