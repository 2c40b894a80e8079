"""One optimizer step as an object, which the loop, the benchmark and the conformance tests use."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ddp_trainer.data.loaders import Batch, TrainLoader
from ddp_trainer.distributed.seeding import derive_seed, seed_device
from ddp_trainer.distributed.world import World
from ddp_trainer.models.weights import AveragedWeights
from ddp_trainer.optim.interfaces import Factor, Loss
from ddp_trainer.sync.base import GradientSync
from ddp_trainer.sync.buffers import flatten_buffers, preserved_buffers, restore_buffers
from ddp_trainer.training.metrics import MetricSums, NonFinite, sum_of_losses
from ddp_trainer.training.optimizer_state import check_keys, match_layout
from ddp_trainer.training.phase import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """The values of the config that a step needs."""

    global_batch_size: int
    seed: int
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    """The maximum 2-norm of all gradients together; they are clipped to it. None: no clipping."""
    autocast_dtype: torch.dtype | None
    """The dtype of matrix products and convolutions; None: the dtype of the parameters."""
    skips_nonfinite: bool
    """Whether to skip an update whose gradients are infinite or NaN (on_nonfinite=skip)."""
    ema_decay: float | None
    """The weight of the old average, in (0, 1); None: no averaged weights."""


class StepHook(Protocol):
    """Code that runs within each step, on every rank. An exception in it ends the training."""

    def before_forward(self, images: Tensor, labels: Tensor) -> None: ...

    def before_optimizer(self, images: Tensor, labels: Tensor) -> None: ...


class TrainStep:
    """One optimizer step: forward, backward, clipping, loss scaling, optimizer and schedule.

    `model` is the module without a wrapper such as DDP. It is saved, and it is evaluated unless
    there are averaged weights (see `models`). `replica` is the module that ``sync.wrap(model)``
    returns; a step calls `replica`.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: GradientSync,
        optimizer: Optimizer,
        lr_factor: Factor,
        *,
        loss: Loss,
        settings: StepSettings,
        world: World,
    ) -> None:
        self.model = model
        self.sync = sync
        self.optimizer = optimizer
        self.lr_factor = lr_factor
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.loss_per_sample = loss
        self.settings = settings
        self.world = world
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self.hooks: list[StepHook] = []
        decay = settings.ema_decay
        self.ema = None if decay is None else AveragedWeights(model, decay)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        """The number of elements of all parameters; a rank may keep fewer."""
        self.replica = sync.wrap(model)
        sync.attach(optimizer, self.ema and self.ema.module)
        if self.ema is not None:
            self.ema.connect(*map(sync.kept_tensors, (self.ema.module, model)))
        # The sum of losses is multiplied by W/G, for W ranks and a global batch of G images: the
        # mean over ranks is then the mean over images, even if ranks have different numbers.
        self.mean_factor = world.world_size / settings.global_batch_size
        self.buffer_world = world
        """The ranks whose buffers, such as BatchNorm statistics, may differ from each other."""
        uses_fp16 = settings.autocast_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=uses_fp16)
        self.sums = MetricSums(world.device)
        self.nonfinite = NonFinite(world.device)
        self.count = 0
        """The number of optimizer steps taken, over all launches."""

    @property
    def can_skip(self) -> bool:
        """Whether an update is skipped if a gradient is not finite; with fp16, the scaler does."""
        return self.settings.skips_nonfinite or self.scaler.is_enabled()

    @property
    def batch_number(self) -> int:
        """The number of the global batch, from 0 and over all epochs, of this rank's last step."""
        return self.count - 1

    has_whole_sums = False
    """Whether `sums` has the sums over all ranks, on every rank."""

    @property
    def own_sums(self) -> Tensor:
        """This rank's part of the sums over all ranks, float64 [4], see `MetricSums`."""
        return self.sums.vector

    @property
    def lr(self) -> float:
        """The learning rate of the last step, also if another launch has taken it."""
        return self.optimizer.param_groups[0]["initial_lr"] * self.lr_factor(max(0, self.count - 1))

    @property
    def models(self) -> nn.ModuleList:
        """The model, then the model with averaged weights, if any; the last entry is evaluated."""
        return nn.ModuleList([self.model] if self.ema is None else [self.model, self.ema.module])

    def batches(
        self, loader: TrainLoader, *, last_step: int, next_control: Callable[[int], int]
    ) -> Iterator[Batch]:
        """Yield this rank's batches up to optimizer step `last_step`, from those of an epoch.

        next_control: a function that returns the first control point after a step.
        """
        return islice(loader, last_step - self.count)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take one optimizer step; return this rank's part of the mean loss, []. Collective.

        The sum of these parts over ranks is the mean loss of the global batch. images: float32
        [B, C, H, W]. labels: int64 [B], or with mixup and CutMix float32 [B, classes].
        """
        self.seed(f"rank {self.sync.random_stream}")
        self.set_lr(self.count)
        loss = self.compute(images, labels)
        self.count += 1
        return loss

    def compute(self, images: Tensor, labels: Tensor) -> Tensor:
        """Do what a device does in a step; see `__call__`. Collective."""
        self.on_phase(Phase.forward)
        # A skipped update must restore BatchNorm's statistics, because forward changes them.
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
        return loss

    def set_lr(self, step: int) -> None:
        """Set the learning rate of the update after `step` updates."""
        factor = self.lr_factor(step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def seed(self, purpose: str, *, step: int | None = None) -> None:
        """Seed torch's generators by step and purpose: a resumed run then has the same dropout.

        step: the number of the global batch; None: that of the next update.
        """
        number = self.count if step is None else step
        seed = derive_seed(self.settings.seed, step=number, purpose=purpose)
        seed_device(self.world.device, seed)

    def accumulate(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run forward and backward of all microbatches; return the rank's part of the mean loss."""
        *early, last = self.split(images, labels)
        loss = torch.zeros((), device=images.device)
        with self.sync.no_sync():
            for microbatch in early:
                loss += self.forward_backward(*microbatch)
        return loss + self.forward_backward(*last)

    def split(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split a rank's share of a batch into microbatches whose sizes differ by at most one."""
        parts = self.settings.gradient_accumulation_steps
        return list(zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True))

    def forward_backward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Add a microbatch's gradients to ``.grad``; return its loss sum / global batch size."""
        self.on_phase(Phase.forward)
        loss, loss_sum, logits = self.compute_loss(self.replica, images, labels)
        self.sums.add(loss_sum, logits, labels)
        self.on_phase(Phase.backward)
        loss.backward()
        return loss_sum / self.settings.global_batch_size

    def compute_loss(
        self, module: nn.Module, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run forward; return the loss for backward [], the sum of losses [], the logits [B, C].

        The loss for backward is scaled so that the gradients of all microbatches, averaged over
        ranks, are those of the mean loss of the global batch (with fp16, times the loss scale).
        The other two are detached.
        """
        with self.autocast():
            logits = module(images)
        loss_sum = sum_of_losses(self.loss_per_sample, logits.float(), labels)
        loss = self.scaler.scale(loss_sum * self.mean_factor)
        return loss, loss_sum.detach(), logits.detach()

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which a forward pass runs at the configured precision."""
        dtype = self.settings.autocast_dtype
        return torch.autocast(self.world.device.type, dtype, enabled=dtype is not None)

    def update(self, loss: Tensor, statistics: Tensor | None) -> None:
        """Clip the gradients and update the parameters.

        Records on the device whether the loss or the norm of the gradients is not finite. With
        fp16, only the loss is checked.
        statistics: the floating-point buffers before the step, float32 [n], which are restored if
        the update is skipped; None: buffers are not restored.
        """
        self.scaler.unscale_(self.optimizer)
        norm = self.sync.gradient_norm(self.model)
        max_norm = self.settings.max_grad_norm
        if max_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

        uses_scaler = self.scaler.is_enabled()
        # 0 * norm is NaN if the norm is not finite. With fp16 the norm is not checked, because
        # gradients overflow sometimes, and the scaler then skips the update.
        checked = loss if uses_scaler else loss + 0 * norm
        self.nonfinite.check(checked)
        if self.can_skip:
            self.sums.add_skipped(~norm.isfinite())
        if statistics is not None:
            # Averaged gradients have the same norm on all ranks, so that all ranks skip the update
            # or none does. With local SGD, one rank may skip it; parameters are averaged later.
            is_bad = ~norm.isfinite()  # optimizers that can skip read it as found_inf
            if not uses_scaler:
                self.optimizer.found_inf = is_bad.float()  # type: ignore[attr-defined]
            now = flatten_buffers(self.model)
            restore_buffers(self.model, torch.where(is_bad, statistics, now))

        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def begin_training(self) -> None:
        """Put the model into training mode, except frozen BatchNorm layers.

        The statistics of frozen layers must not change.
        """
        self.replica.train()
        for module in self.replica.modules():
            own = list(module.parameters(recurse=False))
            is_frozen = bool(own) and not any(parameter.requires_grad for parameter in own)
            if isinstance(module, _BatchNorm) and is_frozen:
                module.eval()

    def measure_statistics(
        self, model: nn.Module, batches: Iterable[Batch], reset: Callable[[], None]
    ) -> None:
        """Run forward passes of `model`, whose BatchNorm layers take the mean of their statistics.

        reset: a function that sets the statistics to their initial values.
        """
        reset()
        for batch in batches:
            with self.autocast():
                model(batch.images)

    def prime_ddp(self, images: Tensor, *others: Tensor) -> Tensor:
        """Run forward and backward twice without an update; return the logits. Collective.

        DDP rebuilds its buckets after the first backward. Without these passes, the first step
        after a resume would sum gradients in another order than the same step of an uninterrupted
        run, and with three or more ranks the sums would be rounded differently.
        images: float32 [B, C, H, W] with the strides of a batch, because other strides would need
        another compilation. others: images of other batch sizes, for which the model is compiled.
        """

        def run(images: Tensor) -> Tensor:
            with self.autocast():
                logits = self.replica(images)
            (logits.float().sum() * 0).backward()
            return logits.detach()

        logits = torch.empty(0)
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
        """Return the state of optimizer and scaler, and the step count. Collective."""
        return {
            "optimizer": self.sync.optimizer_state(self.optimizer),
            "scaler": self.scaler.state_dict(),
            "step": self.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, except the optimizer's parameter groups."""
        groups = self.optimizer.state_dict()["param_groups"]  # those of the config, not the saved
        saved = state["optimizer"]["state"]
        check_keys(self.optimizer, saved)
        self.optimizer.load_state_dict({"state": saved, "param_groups": groups})
        match_layout(self.optimizer)
        self.scaler.load_state_dict(state["scaler"])
        self.count = self.nonfinite.steps_before = state["step"]
