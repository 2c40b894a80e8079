"""The log window (the steps between two logged ones): loss, accuracy, speed, and each rank's time
without waiting.
"""

from pathlib import Path

from ddp_trainer.data.loaders import Loaders
from ddp_trainer.observers.loggers.base import Value
from ddp_trainer.observers.memory import peak_memory_mb, reset_peak_memory
from ddp_trainer.observers.rank_reports import RankReports
from ddp_trainer.observers.step_timer import OWN_PHASES, StepTimer
from ddp_trainer.observers.utilization import Utilization
from ddp_trainer.training.control import Decision
from ddp_trainer.training.step import TrainStep


class LogWindow:
    """Records the steps since values were last logged. Collective: every rank must
    construct one.
    """

    def __init__(
        self,
        step: TrainStep,
        timer: StepTimer,
        loaders: Loaders,
        *,
        log_every_steps: int,
        run_dir: Path,
    ) -> None:
        self.step = step
        self.timer = timer
        world = step.world
        ranks = world.world_size
        batch = step.settings.global_batch_size
        shares = [len(range(rank, batch, ranks)) for rank in range(ranks)]
        self.reports = RankReports(
            timer.own_times,
            OWN_PHASES,
            world=world,
            shares=shares,
            log_every_steps=log_every_steps,
            run_dir=run_dir,
        )
        self.utilization = Utilization(
            step.model, loaders.image_shape, device=world.device, dtype=step.settings.autocast_dtype
        )
        self.line = "nothing left to train"
        """Loss, accuracy and speed of the last window, for the console."""

    def start(self) -> None:
        """Prepare for the first step of a launch: reset peak memory, and read earlier step times
        from ranks.jsonl.
        """
        reset_peak_memory(self.step.world.device)
        self.reports.start(self.step.count)

    def close(self, epoch: int, decision: Decision) -> dict[str, Value]:
        """Return by tag what to log since the last call: loss, accuracy, speed, times, memory.
        Begin a new window.

        decision: the result of `ControlPoint.decide` after this step, with the loss, accuracy and
        times of all ranks.
        """
        step = self.step
        world = self.step.world
        step.sums.vector.zero_()
        values: dict[str, Value] = {
            "epoch": epoch,
            "train/loss": decision.loss,
            "train/top1": decision.top1,
        }
        values |= {"optim/lr": step.lr, "memory/peak_mb": peak_memory_mb(world.device)}
        if decision.log:
            values |= self.reports.add(decision.by_rank, step.count, epoch)
        values |= self.timer.close_window(step.settings.global_batch_size)
        rate = self.timer.rates[-1]
        values["throughput/images_per_second_per_rank"] = rate / world.world_size
        values |= {
            f"throughput/{name}": value
            for name, value in self.utilizations(rate).items()
            if value is not None
        }
        # the time of measuring a matrix product must not count for the next window
        if len(self.timer.rates) == 1:
            self.timer.restart()
            reset_peak_memory(world.device)
        self.line = f"loss {decision.loss:.4f} · train {decision.top1:.4f} · {rate:,.0f} img/s"
        return values

    def utilizations(self, rate: float | None) -> dict[str, float | None]:
        """Return ``matmul_utilization`` and ``mfu`` at `rate` images per second over all ranks
        (None: unknown rate).

        They are the training's FLOP/s, divided by those of a matrix product and by the GPU's peak;
        None: unknown.
        """
        if rate is None:
            return {"matmul_utilization": None, "mfu": None}
        per_device = rate / (self.step.world.world_size * self.step.sync.num_devices)
        return {
            "matmul_utilization": self.utilization.of_matmul(per_device),
            "mfu": self.utilization.mfu(per_device),
        }
