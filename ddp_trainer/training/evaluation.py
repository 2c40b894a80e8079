"""Evaluation: every sample once, over all ranks."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_trainer.data.loaders import Batch
from ddp_trainer.distributed.process_group import World
from ddp_trainer.sync.buffers import averaged_statistics
from ddp_trainer.training.metrics import Evaluation, MetricSums


@torch.inference_mode()
def evaluate(
    model: nn.Module, loader: Iterable[Batch], world: World, autocast_dtype: torch.dtype | None = None
) -> Evaluation:
    """Return the mean loss and accuracy of `model` over the batches of all ranks.

    BatchNorm statistics are averaged over ranks meanwhile. Collective: every rank must call this.
    """
    sums = MetricSums(world.device)
    model.eval()
    with eager(model), averaged_statistics(model, world):
        for batch in loader:
            with torch.autocast(world.device.type, autocast_dtype, enabled=autocast_dtype is not None):
                logits = model(batch.images)
            sums.add(cross_entropy(logits.float(), batch.labels, reduction="sum"), logits, batch.labels)
    loss, correct, count = world.all_reduce(sums.vector).tolist()
    return Evaluation(loss=loss / count, top1=correct / count, count=int(count)) if count else Evaluation()


def eager(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a compiled model runs eagerly, because the last batch has another size."""
    is_compiled = getattr(model, "_compiled_call_impl", None) is not None
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
