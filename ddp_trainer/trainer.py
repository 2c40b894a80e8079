"""The training loop: the same on one process and on many, from the start and from a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_trainer.checkpoint import Checkpoints, State
from ddp_trainer.composition import to_builtins
from ddp_trainer.config import Config, OnNonfinite, Precision
from ddp_trainer.data import EvaluationLoader, ResidentLoader
from ddp_trainer.distributed import World
from ddp_trainer.flops import Utilisation
from ddp_trainer.metrics import Evaluation, Ledger, Progress, Sums, check_replicas, peak_memory_mb, reset_peak_memory
from ddp_trainer.optim import match_layout
from ddp_trainer.summary import Status, Summary
from ddp_trainer.sync import GradientSync, averaged_statistics, flatten_buffers, restore_buffers
from ddp_trainer.timeline import Timeline
from ddp_trainer.watch import Watch
from ddp_trainer.writer import Writer

logger = logging.getLogger(__name__)

CONTROL_SECONDS = 1.0
"""Ranks agree on stopping and saving at log points, and at least about this often where steps are slow."""

AUTOCAST = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


class Trainer:
    """Train `model` as `config` says. Every rank builds one and calls `fit`.

    `model` is the bare module, evaluated, clipped and saved; `replica` is what the strategy made of it, and what
    training calls.
    """

    def __init__(
        self,
        config: Config,
        *,
        world: World,
        model: nn.Module,
        replica: nn.Module,
        sync: GradientSync,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        loader: ResidentLoader,
        eval_loader: EvaluationLoader,
        checkpoints: Checkpoints,
        writer: Writer,
        watch: Watch,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.world, self.model, self.replica, self.sync = config, world, model, replica, sync
        self.optimizer, self.scheduler = optimizer, scheduler
        self.loader, self.eval_loader = loader, eval_loader
        self.checkpoints, self.writer, self.watch, self.should_stop = checkpoints, writer, watch, should_stop
        self.autocast_dtype = AUTOCAST.get(config.precision)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision is Precision.fp16)
        self.steps_per_epoch = loader.sampler.steps_per_epoch
        self.progress, self.timeline = Progress(world), Timeline(world.device, model)
        self.utilisation = Utilisation(model, loader.image_shape, device=world.device, dtype=self.autocast_dtype)
        self.lr = 0.0
        """What the last step used."""
        self.epoch_seconds: list[float] = []
        self.next_control, self.saved_at, self.is_save_due = 0, time.perf_counter(), False
        self.met_at, self.met_step, self.step_seconds = 0.0, 0, CONTROL_SECONDS
        """When ranks last met, and how long a step took before."""
        self.train_line = "nothing left to train"

    # --- the loop -------------------------------------------------------------------------------

    def fit(self) -> Summary:
        """Train, evaluate and save until done or stopped. Collective: every rank must call this."""
        resumed = self.checkpoints.restore(self)
        if self.step >= self.last_step and resumed:
            return self.repeat_summary()
        reset_peak_memory(self.world.device)
        self.sync.begin()
        check_replicas(self.model, self.world, step=self.step)
        self.writer.open(step=self.step)
        self.warm_up()
        while self.step < self.last_step:
            epoch = self.step // self.steps_per_epoch
            status = self.train_epoch(epoch)
            is_best = status is not Status.stopped and self.evaluate(epoch)
            self.save(is_best=is_best)
            if status is Status.stopped:
                return self.summary(status)
        return self.summary(self.status)

    @property
    def step(self) -> int:
        """The number of optimizer steps taken, over all launches."""
        return self.progress.step

    @property
    def num_devices(self) -> int:
        """The devices that all ranks together train on."""
        return self.world.world_size * self.sync.num_devices

    @property
    def last_step(self) -> int:
        """The optimizer step at which this launch ends."""
        planned = self.config.epochs * self.steps_per_epoch
        return planned if self.config.max_steps is None else min(planned, self.config.max_steps)

    @property
    def status(self) -> Status:
        """What a launch that was not stopped has come to."""
        return Status.finished if self.step >= self.config.epochs * self.steps_per_epoch else Status.max_steps

    def train_epoch(self, epoch: int) -> Status:
        """Train from where the epoch stands to its end, the launch's last step or a soft stop."""
        began, start = time.perf_counter(), self.step % self.steps_per_epoch
        self.loader.sampler.set_epoch(epoch, start)
        if start == 0:
            self.progress.ledger = Ledger(self.world.device)
        end = min(self.last_step, (epoch + 1) * self.steps_per_epoch)
        self.met_at, self.met_step = began, self.step
        self.next_control = self.step  # a stop asked for during evaluation is seen at the first step
        self.timeline.restart()
        self.model.train()
        with self.writer.epoch(epoch, epochs=self.config.epochs, step=start, steps=self.steps_per_epoch):
            for batch in self.timeline.timed(self.loader):
                self.train_step(batch.images, batch.labels)
                self.progress.ledger.add(batch.ids, step=self.step % self.steps_per_epoch)
                self.progress.step += 1
                self.watch.step, self.watch.phase = self.step, "data"
                self.writer.advance()
                if self.step == end:
                    self.sync.settle(self.optimizer)
                if self.meet(epoch, is_last=self.step == end) and self.step < end:
                    return Status.stopped
                if self.step == end:
                    break
        if start == 0 and end == (epoch + 1) * self.steps_per_epoch:
            self.epoch_seconds.append(time.perf_counter() - began)
        return Status.finished

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take one optimizer step. images: [B, C, H, W], labels: [B] -> this rank's share of the mean loss []."""
        self.enter("forward/backward")
        statistics = flatten_buffers(self.model) if self.skips else None
        *early, last = self.microbatches(images, labels)
        loss = torch.zeros((), device=images.device)
        with self.sync.no_sync():
            for batch in early:
                loss += self.backward(*batch)
        loss += self.backward(*last)
        self.enter("gradient sync")
        self.sync.before_step()  # .grad is now the mean over ranks
        self.enter("optimizer")
        self.clip_and_step(loss, statistics)
        self.enter("gradient sync")
        self.sync.after_step(self.optimizer)  # parameters are equal on every rank
        self.enter("between steps")
        return loss

    def enter(self, phase: str) -> None:
        """Go on to another phase of a step, for the timeline and for whoever asks where this rank is."""
        self.watch.phase = phase
        self.timeline.enter(phase)

    def microbatches(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split a rank's share of a global batch into parts that differ by at most one sample."""
        parts = self.config.num_microbatches
        return list(zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True))

    def backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add a microbatch's gradients up. Return its share of the global batch's mean loss []."""
        with self.autocast():
            logits = self.replica(images)
        loss_sum = cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=self.config.label_smoothing)
        # A sum times W/G: the mean over ranks is then the mean over the batch, whatever each rank's share of it.
        scale = self.world.world_size / self.config.global_batch_size
        self.progress.sums.add(loss_sum.detach(), logits.detach(), labels)
        self.scaler.scale(loss_sum * scale).backward()
        return loss_sum.detach() / self.config.global_batch_size

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which a forward pass runs at the configured precision."""
        dtype = self.autocast_dtype
        return torch.autocast(self.world.device.type, dtype, enabled=dtype is not None)

    @property
    def skips(self) -> bool:
        """Say whether updates that are not finite are left out, by us: fp16's scaler does so by itself."""
        return self.config.on_nonfinite is OnNonfinite.skip and not self.scaler.is_enabled()

    def clip_and_step(self, loss: Tensor, statistics: Tensor | None) -> None:
        """Clip the mean gradient if asked to, update the parameters, move the schedule on.

        statistics: the floating buffers [n] before the step, for one that is left out.
        """
        self.check_and_clip(loss)
        if statistics is not None:  # a forward that is not finite has got into BatchNorm's
            is_bad = self.optimizer.found_inf.bool()  # type: ignore[attr-defined]
            restore_buffers(self.model, torch.where(is_bad, statistics, flatten_buffers(self.model)))
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()

    def check_and_clip(self, loss: Tensor) -> None:
        """Note a loss or gradient that is not finite, and scale gradients down to the configured norm."""
        values, most = [loss], self.config.max_grad_norm
        if most is not None:
            self.scaler.unscale_(self.optimizer)
        # Gradients of fp16 overflow now and then: the scaler sees to that.
        if most is not None or not self.scaler.is_enabled():
            norm = self.sync.gradient_norm(self.model)
            if most is not None:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)
            if not self.scaler.is_enabled():
                values.append(norm)
                if self.skips:  # by the norm: unlike the loss, alike on all ranks
                    self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # fused ones skip
        self.progress.nonfinite.check(torch.stack(values), step=self.step)

    def warm_up(self) -> None:
        """Run forward and backward twice and forget it, so that no step is special because it is a launch's first.

        DDP rearranges its buckets after the first backward; without this the first step after a resume would sum
        in another order than the same step of an uninterrupted run, and from three ranks on round differently.
        """
        kept = [buffer.clone() for buffer in self.model.buffers()]
        whole = self.config.compile or self.world.device.type == "cuda"
        count = self.loader.sampler.local_batch_size // self.config.num_microbatches if whole else 2
        black = torch.zeros(count, *self.loader.image_shape, dtype=torch.uint8, device=self.world.device)
        images = self.loader.normalise(black)  # with the very strides of a batch: others would be compiled apart
        self.model.train()
        for _ in range(2):
            with self.autocast():
                logits = self.replica(images)
            (logits.float().sum() * 0).backward()
            self.sync.before_step()
            self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(value)

    # --- where ranks meet -----------------------------------------------------------------------

    def meet(self, epoch: int, *, is_last: bool) -> bool:
        """Log, save mid-epoch and look for a soft stop where that is due. Return whether to stop, alike on all ranks.

        This is the only place in an epoch, besides the gradients, where ranks talk or the host waits for the device.
        """
        every = self.config.checkpoint.every_steps
        log = is_last or self.step % self.config.log_every_steps == 0
        save = every is not None and self.step % every == 0
        if not (log or save or self.step >= self.next_control):
            return False
        stop, is_time_to_save = self.agree(epoch, log=log)
        self.is_save_due |= save or is_time_to_save
        if not self.sync.is_settled:
            if stop or self.is_save_due:
                self.next_control = self.step + 1  # ranks are apart now: see to it when they are not
            return False
        if self.is_save_due and not is_last and not stop:
            self.save()
        return stop

    def agree(self, epoch: int, *, log: bool) -> tuple[bool, bool]:
        """Reduce flags and the window's sums in one collective. Return (stop, time to save).

        Raises:
            DivergedError: on all ranks, when a step since the last meeting was not finite on any.
        """
        every = self.config.checkpoint.every_seconds
        flags = [float(self.should_stop()), 0.0, 0.0]
        if self.world.is_main:
            flags[1] = float(every is not None and time.perf_counter() - self.saved_at >= every)
            flags[2] = self.step_seconds
        mine = torch.tensor(flags, dtype=torch.float64).to(self.world.device, non_blocking=True)
        total = self.world.sum(torch.cat([mine, self.progress.nonfinite.found, self.progress.sums.vector]))
        stop, save, step_seconds, bad, loss, correct, count = total.tolist()
        if bad and self.config.on_nonfinite is OnNonfinite.stop:
            self.progress.nonfinite.tell(self.world, lr=self.lr)
        now = time.perf_counter()  # the device has been waited for
        self.step_seconds = (now - self.met_at) / max(1, self.step - self.met_step)
        self.met_at, self.met_step = now, self.step
        self.next_control = self.step + max(1, int(CONTROL_SECONDS / step_seconds))
        if log:
            self.progress.sums.reset()
            self.log_window(epoch, loss=loss / count, top1=correct / count)
        return stop > 0, save > 0

    def log_window(self, epoch: int, *, loss: float, top1: float) -> None:
        """Record what the steps since the last log point came to, over all ranks."""
        now = time.time()  # measuring the peak takes a moment
        tags: dict[str, float | str] = {"train/loss": loss, "train/top1": top1, "optim/lr": self.lr}
        tags |= self.timeline.close_window(self.config.global_batch_size)
        tags["memory/peak_mb"] = peak_memory_mb(self.world.device)
        rate = self.timeline.rates[-1]
        tags["throughput/images_per_second_per_rank"] = rate / self.world.world_size
        tags["throughput/mfu"] = self.utilisation.at(rate / self.num_devices)
        if len(self.timeline.rates) == 1:  # the peak has just been measured: that is not of the next window's time
            self.timeline.restart()
            reset_peak_memory(self.world.device)
        self.writer.scalars(tags, step=self.step, epoch=epoch, at=now)
        self.train_line = f"loss {loss:.4f} · train {top1:.4f} · {rate:,.0f} img/s"

    def save(self, *, is_best: bool = False) -> None:
        """Save a checkpoint after seeing that all replicas are equal. Collective: every rank must call this."""
        self.watch.phase = "save"
        check_replicas(self.model, self.world, step=self.step)
        self.checkpoints.save(self, is_best=is_best)
        self.saved_at, self.is_save_due = time.perf_counter(), False

    # --- evaluation -----------------------------------------------------------------------------

    @torch.inference_mode()
    def evaluate(self, epoch: int) -> bool:
        """Measure the model on every evaluation sample once. Return whether it is the best so far.

        Collective: every rank must call this.
        """
        self.watch.phase = "evaluation"
        sums = Sums(self.world.device)
        self.model.eval()
        # Batches of other sizes would each be compiled, for seconds, to save a fraction of one.
        eager = torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext()
        with eager, averaged_statistics(self.model, self.world):
            for batch in self.eval_loader:
                with self.autocast():
                    logits = self.model(batch.images)
                sums.add(cross_entropy(logits.float(), batch.labels, reduction="sum"), logits, batch.labels)
        digest, samples = self.world.sum(self.progress.ledger.vector.clone()).tolist()
        loss, correct, count = self.world.sum(sums.vector).tolist()
        self.progress.evaluation = found = Evaluation(loss=loss / count, top1=correct / count, count=int(count))
        # Only whole epochs compete: where a launch happened to end must not choose the best model.
        is_best = self.step % self.steps_per_epoch == 0 and found.top1 > self.progress.best_top1
        if is_best:
            self.progress.best_top1 = found.top1
        tags: dict[str, float | str] = {"eval/loss": found.loss, "eval/top1": found.top1, "eval/count": found.count}
        tags |= {"ledger/samples": samples, "ledger/digest": Ledger.text(digest)}
        self.writer.scalars(tags, step=self.step, epoch=epoch)
        logger.info("epoch %d/%d · %s · test %.4f", epoch + 1, self.config.epochs, self.train_line, found.top1)
        return is_best

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Return all that training needs to go on. Collective: every rank must call this."""
        with averaged_statistics(self.model, self.world) as own:
            model = {key: value.clone() for key, value in self.model.state_dict().items()}
        return {
            "model": model,
            "optimizer": self.sync.optimizer_state(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "epoch": self.step // self.steps_per_epoch,
            "samples_seen": self.step * self.config.global_batch_size,
            "config": to_builtins(self.config),
            "best_top1": self.progress.best_top1,
            "train_samples": self.loader.sampler.length,
            "statistics_by_rank": self.world.gather_tensor(own),
            "progress": self.progress.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Take up training where `state` left it, at this world size or another."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        match_layout(self.optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        if len(state["statistics_by_rank"]) == self.world.world_size:
            restore_buffers(self.model, state["statistics_by_rank"][self.world.rank])
        self.progress.load_state_dict(state["progress"], step=state["step"], best_top1=state["best_top1"])

    # --- the end --------------------------------------------------------------------------------

    def summary(self, status: Status) -> Summary:
        """Return what this launch came to."""
        rate = self.timeline.median_rate()
        images = self.steps_per_epoch * self.config.global_batch_size
        whole_epochs = sorted(self.epoch_seconds)
        estimate = images / rate if rate else float("nan")
        return Summary(
            status=status,
            eval_top1=self.progress.evaluation.top1,
            eval_loss=self.progress.evaluation.loss,
            eval_count=self.progress.evaluation.count,
            best_top1=self.progress.best_top1,
            epochs=self.step // self.steps_per_epoch,
            steps=self.step,
            seconds=self.progress.seconds(),
            images_per_second=rate,
            mfu=self.utilisation.at(rate / self.num_devices) if rate else 0.0,
            seconds_per_epoch=whole_epochs[len(whole_epochs) // 2] if whole_epochs else estimate,
            world_size=self.world.world_size,
            device=self.world.device.type,
            backend=self.world.backend,
            sync=self.config.sync.name,
        )

    def repeat_summary(self) -> Summary:
        """Return the summary of the launch that trained the last step, evaluating again if it is lost."""
        logger.info("%s: nothing left to train after step %d", self.status.value, self.step)
        path = self.writer.run_dir / "summary.json"
        text = self.world.broadcast(path.read_text() if self.world.is_main and path.exists() else "")
        if text and (summary := Summary.from_json(text)).steps == self.step:
            return summary
        self.evaluate(self.step // self.steps_per_epoch - 1)
        return self.summary(self.status)
