"""Evaluation: each sample is evaluated once, by one of the ranks."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddp_trainer.data.loaders import Batch
from ddp_trainer.distributed.process_group import World
from ddp_trainer.training.results import LABEL, LOSS, PREDICTION, SampleResults

Metric = Callable[[Tensor, Tensor], float]
"""A function of the probabilities, float32 [N, C], and the labels, int64 [N], of all samples."""


class MetricError(RuntimeError):
    """A metric raised an exception, or did not return a number."""


@dataclass(slots=True)
class Evaluation:
    """Mean loss and accuracy over `count` samples; the loss is None before the first one."""

    loss: float | None = None
    top1: float = 0.0
    count: int = 0


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    keeps_probabilities: bool = False,
) -> SampleResults:
    """Return the results of this rank's samples in `loader`. Leaves `model` in evaluation mode.

    dtype: that of matrix products and convolutions (autocast); None: that of the parameters.
    """
    results = SampleResults(device, keeps_probabilities=keeps_probabilities)
    model.eval()
    is_compiled = getattr(model, "_compiled_call_impl", None) is not None
    # A compiled model runs eagerly, because the last batch has another size.
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
        for batch in loader:
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = model(batch.images)
            results.add(logits, batch.labels, batch.ids)
    return results


def mean_over_ranks(results: SampleResults, world: World) -> Evaluation:
    """Return the mean loss and accuracy over the samples of all ranks. Collective."""
    rows = results.rows()
    correct = rows[:, LABEL] == rows[:, PREDICTION]
    ones = torch.ones_like(rows[:, LOSS])
    sums = torch.stack([rows[:, LOSS], correct.double(), ones]).sum(1)
    loss, right, count = world.all_reduce(sums).tolist()
    if not count:
        return Evaluation()
    return Evaluation(loss=loss / count, top1=right / count, count=int(count))


def compute_metrics(
    metrics: Mapping[str, Metric], results: SampleResults, world: World
) -> dict[str, float]:
    """Return ``eval/<name>`` of each metric, computed on rank 0, on all ranks. Collective.

    Raises:
        MetricError: on rank 0, if a metric fails.
    """
    if not metrics:
        return {}
    probabilities, labels = results.gather_probabilities(world)
    values = {}
    if world.is_main:
        for name, metric in metrics.items():
            try:
                values[f"eval/{name}"] = float(metric(probabilities, labels))
            except Exception as error:  # a plug-in's code may raise anything
                raise MetricError(
                    f"metric={name} failed ({type(error).__name__}: {error})"
                ) from error
    return world.broadcast_object(values)
