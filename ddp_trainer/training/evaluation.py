"""Evaluation: each sample is evaluated once, by one of the ranks."""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import nn

from ddp_trainer.data.loaders import Batch
from ddp_trainer.distributed.process_group import World
from ddp_trainer.training.metrics import Evaluation
from ddp_trainer.training.results import LABEL, LOSS, PREDICTION, SampleResults


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    device: torch.device,
    autocast_dtype: torch.dtype | None = None,
) -> SampleResults:
    """Return label, prediction and loss of this rank's samples in `loader`. Leave `model` in
    evaluation mode.
    """
    results = SampleResults(device)
    model.eval()
    is_compiled = getattr(model, "_compiled_call_impl", None) is not None
    # A compiled model runs eagerly, because the last batch has another size.
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        for batch in loader:
            with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
                logits = model(batch.images)
            results.add(logits, batch.labels, batch.ids)
    return results


def mean_over_ranks(results: SampleResults, world: World) -> Evaluation:
    """Return the mean loss and accuracy over the samples of all ranks. Collective: every rank must
    call this.
    """
    rows = results.rows()
    correct = rows[:, LABEL] == rows[:, PREDICTION]
    ones = torch.ones_like(rows[:, LOSS])
    sums = torch.stack([rows[:, LOSS], correct.double(), ones]).sum(1)
    loss, right, count = world.all_reduce(sums).tolist()
    return (
        Evaluation(loss=loss / count, top1=right / count, count=int(count))
        if count
        else Evaluation()
    )
