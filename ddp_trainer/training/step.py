"""One optimizer step as an object, which the trainer, the benchmark and the conformance
tests use.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_trainer.config.schema import EmaConfig, OnNonfinite, Precision
from ddp_trainer.distributed.process_group import World
from ddp_trainer.distributed.seeding import derive_seed, seed_device
from ddp_trainer.models.ema import AveragedWeights
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.buffers import flatten_buffers, restore_buffers
from ddp_trainer.training.metrics import MetricSums, NonFinite
from ddp_trainer.training.optimizers import match_layout

AUTOCAST = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """The values of the config that a step needs."""

    global_batch_size: int
    seed: int = 0
    gradient_accumulation_steps: int = 1
    label_smoothing: float = 0.0
    max_grad_norm: float | None = None
    precision: Precision = Precision.fp32
    """fp32, bf16 or fp16; "auto" has been replaced by one of them."""
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    ema: EmaConfig = field(default_factory=EmaConfig)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of matrix products and convolutions; None for the dtype of the parameters."""
        return AUTOCAST.get(self.precision)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which a forward pass runs at the configured precision."""
        return torch.autocast(
            device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None
        )


class StepCheck(Protocol):
    """A check of the gradients before the optimizer uses them, in steps where `is_due`; its errors
    end the training.
    """

    def begin(self, step: int) -> None: ...
    @property
    def is_due(self) -> bool: ...
    def watch(self, images: Tensor, labels: Tensor) -> None: ...
    def compare(self, images: Tensor, labels: Tensor) -> None: ...


class TrainStep:
    """One optimizer step: forward, backward, gradient accumulation, clipping, loss scaling,
    optimizer and schedule.

    `model` is the bare module, which is evaluated, clipped and saved. `replica` is the module that
    the strategy returns for `model`; a step calls `replica`.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: GradientSync,
        optimizer: Optimizer,
        scheduler: LambdaLR,
        *,
        settings: StepSettings,
        world: World,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.model = model
        self.sync = sync
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.settings = settings
        self.world = world
        self.on_phase = on_phase
        self.ema = (
            None if settings.ema.decay is None else AveragedWeights(model, settings.ema.decay)
        )
        self.models = nn.ModuleList([model] if self.ema is None else [model, self.ema.module])
        """The model, and the model with averaged weights if there is one; the last entry is
        evaluated.
        """
        self.replica = sync.wrap(model)
        self.scaler = torch.amp.GradScaler(
            world.device.type, enabled=settings.precision is Precision.fp16
        )
        self.sums = MetricSums(world.device)
        self.nonfinite = NonFinite(world.device)
        self.check: StepCheck | None = None
        self.count = 0
        """The number of optimizer steps taken, over all launches."""
        self.lr = 0.0
        """The learning rate of the last step."""

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take one optimizer step. Return this rank's part of the mean loss, a scalar; the sum over
        ranks is the mean.

        images: float32 [B, C, H, W], labels: int64 [B], or float32 [B, classes] for mixed images.
        """
        self.on_phase("forward")
        # Dropout draws from torch's generator. Its seed depends on the step, so that a resumed run
        # draws the same.
        seed = derive_seed(self.settings.seed, step=self.count, purpose=f"rank {self.world.rank}")
        seed_device(self.world.device, seed)
        statistics = (
            flatten_buffers(self.model) if self.settings.on_nonfinite is OnNonfinite.skip else None
        )
        check = self.check if self.check is not None and self.check.is_due else None
        if check is not None:
            check.watch(images, labels)
        *early, last = self.split(images, labels)
        loss = torch.zeros((), device=images.device)
        with self.sync.no_sync():
            for microbatch in early:
                loss += self.backward(*microbatch)
        loss += self.backward(*last)
        self.on_phase("gradient sync")
        # .grad is now the mean over ranks, if the strategy averages gradients
        self.sync.before_step()
        if check is not None:
            self.on_phase("check")
            check.compare(images, labels)
        self.on_phase("optimizer")
        self.clip_and_step(loss, statistics)
        self.on_phase("gradient sync")
        # parameters are equal on every rank, if sync.is_synchronized
        self.sync.after_step(self.optimizer)
        if self.ema is not None:
            self.ema.update()
        self.on_phase("between steps")
        self.count += 1
        return loss

    def begin_training(self) -> None:
        """Put the model into training mode, except frozen BatchNorm layers, whose statistics must
        not change.
        """
        self.replica.train()
        for module in self.replica.modules():
            own = list(module.parameters(recurse=False))
            if (
                isinstance(module, _BatchNorm)
                and own
                and not any(parameter.requires_grad for parameter in own)
            ):
                module.eval()

    def split(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split a rank's share of a global batch into microbatches whose sizes differ by at most
        one.
        """
        parts = self.settings.gradient_accumulation_steps
        return list(zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True))

    def backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add a microbatch's gradients to ``.grad``. Return the sum of its losses, divided by the
        global batch size.
        """
        self.on_phase("forward")
        loss, loss_sum, logits = self.loss(self.replica, images, labels)
        self.sums.add(loss_sum, logits, labels)
        self.on_phase("backward")
        loss.backward()
        return loss_sum / self.settings.global_batch_size

    def loss(
        self, module: nn.Module, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a microbatch's loss for backward [], the sum of its samples' losses [], and its
        logits [B, C].

        The loss for backward is scaled so that the gradients of all microbatches, averaged over
        ranks, are those of the mean loss of the global batch (with fp16, times the loss scale). The
        other two are detached.
        """
        settings = self.settings
        with settings.autocast(self.world.device):
            logits = module(images)
        loss_sum = sum_of_losses(logits.float(), labels, label_smoothing=settings.label_smoothing)
        # The sum times W/G, so that the mean over W ranks is the mean over the G images, even with
        # unequal shares.
        scale = self.world.world_size / settings.global_batch_size
        return self.scaler.scale(loss_sum * scale), loss_sum.detach(), logits.detach()

    def clip_and_step(self, loss: Tensor, statistics: Tensor | None) -> None:
        """Record whether the loss or a gradient is not finite, clip gradients, update parameters,
        advance the schedule.

        statistics: the floating-point buffers [n] before the step, or None. If given, an update
        that is not finite is skipped, and the buffers are restored.
        """
        values = [loss]
        max_norm = self.settings.max_grad_norm
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
        if max_norm is not None or statistics is not None or not self.scaler.is_enabled():
            norm = self.sync.gradient_norm(self.model)
            if max_norm is not None:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
            # gradients of fp16 overflow sometimes, and the scaler skips these updates
            if not self.scaler.is_enabled():
                values.append(norm)
            # decided by the norm, which averaged gradients make equal on all ranks
            if statistics is not None:
                is_bad = ~norm.isfinite()
                if not self.scaler.is_enabled():
                    self.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
                # A forward pass that was not finite has changed BatchNorm's statistics.
                restore_buffers(
                    self.model, torch.where(is_bad, statistics, flatten_buffers(self.model))
                )
        self.nonfinite.check(torch.stack(values), step=self.count + 1)
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()

    def prime_ddp(self, images: Tensor, *others: Tensor) -> torch.Size:
        """Run forward and backward twice without an update, so that DDP's bucket order is the same
        after a resume.

        DDP rebuilds its buckets after the first backward. Without these passes, the first step
        after a resume would sum in another order than the same step of an uninterrupted run, and
        with three or more ranks round differently. images: float32 [B, C, H, W] with the strides of
        a batch, because other strides would need another compilation. others: microbatches of other
        sizes, each run once to be compiled. Returns the shape of the model's output.
        """

        def run(images: Tensor) -> torch.Size:
            with self.settings.autocast(self.world.device):
                logits = self.replica(images)
            (logits.float().sum() * 0).backward()
            return logits.shape

        kept = [buffer.clone() for buffer in self.model.buffers()]
        self.begin_training()
        with self.sync.no_sync():
            for other in others:
                run(other)
        shape = images.shape
        for _ in range(2):
            shape = run(images)
            self.sync.before_step()
            self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), kept, strict=True):
                buffer.copy_(value)
        return shape

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, schedule, scaler and step count. Collective: every rank
        must call this.
        """
        return {
            "optimizer": self.sync.optimizer_state(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, except the learning rate: this run's schedule decides
        it.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        match_layout(self.optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        # The saved learning rate is the next one of the old schedule: wrong if the number of epochs
        # has changed.
        for group, factor in zip(
            self.optimizer.param_groups, self.scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = group["initial_lr"] * factor(self.scheduler.last_epoch)
        self.scaler.load_state_dict(state["scaler"])
        self.count = state["step"]
        if self.check is not None:
            self.check.begin(self.count)


def sum_of_losses(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Return the sum [] of the cross-entropies of a batch; samples without a label do not count.

    logits: [B, C]. labels: int64 [B], -100: no label; or [B, C], the probabilities of the classes,
    all zero: no label.
    """
    if labels.ndim == 1:
        return cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    spread = label_smoothing / labels.shape[1] * labels.sum(1, keepdim=True)
    return cross_entropy(logits, labels * (1 - label_smoothing) + spread, reduction="sum")
