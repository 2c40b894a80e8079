"""One optimizer step as an object, which the loop, the benchmark and the conformance tests use."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_trainer.distributed.seeding import derive_seed, seed_device
from ddp_trainer.distributed.world import World
from ddp_trainer.models.weights import AveragedWeights
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.buffers import flatten_buffers, preserved_buffers, restore_buffers
from ddp_trainer.training.losses import Loss, sum_of_losses
from ddp_trainer.training.metrics import MetricSums, NonFinite
from ddp_trainer.training.optimizers import match_layout
from ddp_trainer.training.phase import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """The values of the config that a step needs."""

    global_batch_size: int
    seed: int
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    autocast_dtype: torch.dtype | None
    """The dtype of matrix products and convolutions; None: the dtype of the parameters."""
    skips_nonfinite: bool
    """Whether an update whose gradients are not finite is skipped (on_nonfinite=skip)."""
    ema_decay: float | None


class StepHook(Protocol):
    """Code that runs inside of each step, on every rank; its errors end the training."""

    def before_forward(self, images: Tensor, labels: Tensor) -> None: ...

    def before_optimizer(self, images: Tensor, labels: Tensor) -> None: ...


class TrainStep:
    """One optimizer step: forward, backward, clipping, loss scaling, optimizer and schedule.

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
        loss: Loss,
        settings: StepSettings,
        world: World,
        on_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> None:
        self.model = model
        self.sync = sync
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loss_per_sample = loss
        self.settings = settings
        self.world = world
        self.on_phase = on_phase
        self.hooks: list[StepHook] = []
        self.ema = None
        if settings.ema_decay is not None:
            self.ema = AveragedWeights(model, settings.ema_decay)
        self.replica = sync.wrap(model)
        uses_fp16 = settings.autocast_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=uses_fp16)
        self.sums = MetricSums(world.device)
        self.nonfinite = NonFinite(world.device)
        self.count = 0
        """The number of optimizer steps taken, over all launches."""
        self.lr = 0.0
        """The learning rate of the last step."""

    @property
    def models(self) -> nn.ModuleList:
        """The model, then the model with averaged weights, if any; the last entry is evaluated."""
        return nn.ModuleList([self.model] if self.ema is None else [self.model, self.ema.module])

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take one optimizer step; return this rank's part of the mean loss, a scalar.

        The sum over ranks is the mean loss of the global batch.
        images: float32 [B, C, H, W]. labels: int64 [B], or float32 [B, classes] for mixed images.
        """
        self.on_phase(Phase.forward)
        self.seed(self.world.rank)
        # Only needed to skip an update: its forward pass has changed BatchNorm's statistics.
        statistics = flatten_buffers(self.model) if self.settings.skips_nonfinite else None
        for hook in self.hooks:
            hook.before_forward(images, labels)

        loss = self.accumulate(images, labels)

        self.on_phase(Phase.gradient_sync)
        self.sync.before_step()  # .grad is now the mean over ranks, if the strategy averages it
        for hook in self.hooks:
            self.on_phase(Phase.check)
            hook.before_optimizer(images, labels)

        self.on_phase(Phase.optimizer)
        self.update(loss, statistics)

        self.on_phase(Phase.gradient_sync)
        self.sync.after_step(self.optimizer)  # parameters are equal, if sync.is_synchronized
        if self.ema is not None:
            self.ema.update()
        self.on_phase(Phase.between_steps)
        self.count += 1
        return loss

    def seed(self, rank: int) -> None:
        """Seed torch's generators for dropout by step and rank: a resumed run draws the same."""
        seed = derive_seed(self.settings.seed, step=self.count, purpose=f"rank {rank}")
        seed_device(self.world.device, seed)

    def accumulate(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run forward and backward of all microbatches; return this rank's part of the loss."""
        *early, last = self.split(images, labels)
        loss = torch.zeros((), device=images.device)
        with self.sync.no_sync():
            for microbatch in early:
                loss += self.backward(*microbatch)
        return loss + self.backward(*last)

    def split(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split a rank's share of a batch into microbatches whose sizes differ by at most one."""
        parts = self.settings.gradient_accumulation_steps
        return list(zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True))

    def backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add a microbatch's gradients to ``.grad``; return its losses / the global batch size."""
        self.on_phase(Phase.forward)
        loss, loss_sum, logits = self.loss(self.replica, images, labels)
        self.sums.add(loss_sum, logits, labels)
        self.on_phase(Phase.backward)
        loss.backward()
        return loss_sum / self.settings.global_batch_size

    def loss(
        self, module: nn.Module, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a microbatch's loss for backward [], the sum of its losses [], its logits [B, C].

        The loss for backward is scaled so that the gradients of all microbatches, averaged over
        ranks, are those of the mean loss of the global batch (with fp16, times the loss scale).
        The other two are detached.
        """
        with self.autocast():
            logits = module(images)
        loss_sum = sum_of_losses(self.loss_per_sample, logits.float(), labels)
        # The sum times W/G: the mean over W ranks is then the mean over the G images, even with
        # unequal shares.
        scale = self.world.world_size / self.settings.global_batch_size
        return self.scaler.scale(loss_sum * scale), loss_sum.detach(), logits.detach()

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which a forward pass runs at the configured precision."""
        dtype = self.settings.autocast_dtype
        return torch.autocast(self.world.device.type, dtype, enabled=dtype is not None)

    def update(self, loss: Tensor, statistics: Tensor | None) -> None:
        """Clip the gradients, update the parameters, and advance the schedule.

        Records whether the loss or the norm of the gradients is not finite, on the device.
        statistics: None, or the floating-point buffers [n] before the step; such an update is then
        skipped, and the buffers are restored.
        """
        self.scaler.unscale_(self.optimizer)
        norm = self.sync.gradient_norm(self.model)
        max_norm = self.settings.max_grad_norm
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)

        uses_scaler = self.scaler.is_enabled()
        # Gradients of fp16 overflow sometimes, and the scaler skips these updates by itself.
        checked = loss if uses_scaler else loss + 0 * norm
        self.nonfinite.check(checked, step=self.count + 1)
        if statistics is not None:
            # Decided by the norm, which averaged gradients make equal on all ranks.
            is_bad = ~norm.isfinite()
            if not uses_scaler:
                self.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
            now = flatten_buffers(self.model)
            restore_buffers(self.model, torch.where(is_bad, statistics, now))

        self.lr = self.optimizer.param_groups[0]["lr"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()

    def begin_training(self) -> None:
        """Put the model into training mode, except frozen BatchNorm layers.

        Their statistics must not change.
        """
        self.replica.train()
        for module in self.replica.modules():
            own = list(module.parameters(recurse=False))
            is_frozen = bool(own) and not any(parameter.requires_grad for parameter in own)
            if isinstance(module, _BatchNorm) and is_frozen:
                module.eval()

    def prime_ddp(self, images: Tensor, *others: Tensor) -> Tensor:
        """Run forward and backward twice without an update; return the logits.

        DDP rebuilds its buckets after the first backward. Without these passes, the first step
        after a resume would sum in another order than the same step of an uninterrupted run, and
        with three or more ranks round differently.
        images: float32 [B, C, H, W] with the strides of a batch, because other strides would need
        another compilation. others: microbatches of other sizes, each run once to be compiled.
        """

        def run(images: Tensor) -> Tensor:
            with self.autocast():
                logits = self.replica(images)
            (logits.float().sum() * 0).backward()
            return logits.detach()

        logits = images
        self.begin_training()
        with preserved_buffers(self.model):
            with self.sync.no_sync():
                for other in others:
                    run(other)
            for _ in range(2):
                logits = run(images)
                self.sync.before_step()
                self.optimizer.zero_grad(set_to_none=True)
        return logits

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimizer, schedule, scaler and step count. Collective."""
        return {
            "optimizer": self.sync.optimizer_state(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, except the learning rate: the schedule decides it."""
        self.optimizer.load_state_dict(state["optimizer"])
        match_layout(self.optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        # The saved rate is the next one of the old schedule: wrong if the epochs have changed.
        factors = self.scheduler.lr_lambdas
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            group["lr"] = group["initial_lr"] * factor(self.scheduler.last_epoch)
        self.scaler.load_state_dict(state["scaler"])
        self.count = state["step"]
