"""A training step of a pipeline: microbatches go through the stages, see `sync.pipeline`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from ddp_trainer.config.errors import require
from ddp_trainer.distributed.world import set_waiting, waiting
from ddp_trainer.sync.buffers import preserved_buffers
from ddp_trainer.sync.pipeline import PipelineSync
from ddp_trainer.training.phase import Phase
from ddp_trainer.training.step import TrainStep


class PipelineStep(TrainStep):
    """A training step whose microbatches go through the stages of a pipeline."""

    sync: PipelineSync

    def __init__(
        self,
        model: nn.Module,
        sync: Any,
        *arguments: Any,
        image_shape: tuple[int, ...],
        **options: Any,
    ) -> None:
        sync.image_shape = image_shape
        super().__init__(model, sync, *arguments, **options)
        # The gradients of the pipelines are averaged.
        num_pipelines = self.sync.replicas.world_size
        self.mean_factor = num_pipelines / self.settings.global_batch_size
        self.schedule: PipelineScheduleSingle | None = None
        """torch's schedule of the passes; None before the first passes of a launch."""
        self.loss_sum = torch.zeros(())
        """The sum of the losses of this step, so far."""

    def prime_ddp(self, images: Tensor, *others: Tensor) -> Tensor:
        """Prepare the passes with images like these; return their logits. Collective."""
        self.begin_training()
        ranks_and_parts = self.world.world_size * self.settings.gradient_accumulation_steps
        size = self.settings.global_batch_size // ranks_and_parts
        self.schedule, logits = self.prepare(torch.cat([images] * size)[:size])
        return logits[: len(images)]

    def accumulate(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run all passes of this rank's stage; return the mean loss on ranks with the last one.

        Other ranks return 0.
        """
        if self.schedule is None:
            self.schedule, _ = self.prepare(self.split(images, labels)[0][0])
        self.on_phase(Phase.gradient_sync)
        last = self.sync.config.num_stages - 1
        inputs = self.sync.gather_at(0, images)
        targets = self.sync.gather_at(last, labels)
        self.loss_sum = torch.zeros((), device=images.device)
        with waiting():
            self.schedule.step(
                *([] if inputs is None else [inputs]), target=targets, return_outputs=False
            )
        return self.loss_sum / self.settings.global_batch_size

    def microbatch_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss for backward, []; add the microbatch to the sums."""
        with self.computing(Phase.forward):
            loss, loss_sum, logits = self.compute_loss(nn.Identity(), logits, labels)
            self.sums.add(loss_sum, logits, labels)
            self.loss_sum += loss_sum
        return loss

    @contextmanager
    def computing(self, phase: Phase) -> Iterator[None]:
        """Return a context within a schedule in which this rank does not wait for others."""
        self.on_phase(phase)
        set_waiting(False)
        yield
        set_waiting(True)
        self.on_phase(Phase.gradient_sync)

    @torch.no_grad()
    def prepare(self, images: Tensor) -> tuple[PipelineScheduleSingle, Tensor]:
        """Check the stages; return the schedule, and the logits of `images`. Collective.

        images: float32 [B, C, H, W], as many as there are in a microbatch.

        Raises:
            ConfigError: the stages together do not compute the same as the model.
        """
        sync = self.sync
        devices = [images.device] if images.is_cuda else []
        values = [images]
        with (
            sync.whole(self.model),
            preserved_buffers(self.model),
            torch.random.fork_rng(devices),
            self.autocast(),
        ):
            self.seed("check")
            logits = self.model(images)
            self.seed("check")
            for part in sync.stages:
                values.append(part(values[-1]))
        require(
            torch.allclose(values[-1], logits, rtol=0.01, atol=0.01, equal_nan=True),
            "sync=pipeline cannot cut the model, because its parts do not compute the same logits:"
            " its operations may depend on values, or change from call to call: use sync=ddp",
        )
        place = sync.pipeline.rank
        schedule = get_schedule_class(sync.config.schedule)(
            Stage(self, sync.stages[place], *values[place : place + 2]),
            n_microbatches=sync.config.num_stages * self.settings.gradient_accumulation_steps,
            loss_fn=self.microbatch_loss,
            scale_grads=False,
        )
        return schedule, logits


class StageModule(nn.Module):
    """Runs a stage in the memory layout of the model, on tensors that gloo can send."""

    def __init__(self, step: PipelineStep, part: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.step = step
        self.part = part
        is_channels_last = example.ndim == 4 and not example.is_contiguous()
        self.memory_format = torch.channels_last if is_channels_last else torch.contiguous_format

    def forward(self, values: Tensor) -> Tensor:
        with self.step.autocast():
            result = self.part(values.clone(memory_format=self.memory_format)).contiguous()
        # torch's schedule runs a backward pass of each stage, also of a frozen one
        return result if result.requires_grad else result.requires_grad_()


class Stage(PipelineStage):
    """torch's stage, which knows the shapes of its tensors, and when this rank does not wait."""

    def __init__(self, step: PipelineStep, part: nn.Module, example: Tensor, result: Tensor):
        pipeline = step.sync.pipeline

        def like(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=True)

        super().__init__(
            StageModule(step, part, example),
            pipeline.rank,
            pipeline.world_size,
            pipeline.device,
            input_args=like(example),
            output_args=like(result),
            group=pipeline.group,
        )
        self.step = step

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        with self.step.computing(Phase.forward):
            try:
                return super().forward_one_chunk(*arguments, **options)
            except RuntimeError as error:  # torch's, from that of the model
                raise error.__cause__ or error from None

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        with self.step.computing(Phase.backward):
            super().backward_one_chunk(*arguments, **options)
