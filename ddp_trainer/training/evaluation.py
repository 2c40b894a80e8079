"""Evaluation: each sample is evaluated once, by one of the ranks."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_trainer.data.loaders import Batch
from ddp_trainer.distributed.world import World

ID, LABEL, PREDICTION, LOSS, CONFIDENCE, IN_TOP5 = range(6)
"""The columns of the rows of `SampleResults`. CONFIDENCE: the probability of the prediction."""

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


class SampleResults:
    """The predictions for the samples of this rank, kept on the device: the host need not wait."""

    def __init__(self, device: torch.device, *, keeps_probabilities: bool = False) -> None:
        """keeps_probabilities: whether `gather_probabilities` is needed, which takes memory."""
        self.parts = [torch.empty(0, 6, dtype=torch.float64, device=device)]
        self.keeps_probabilities = keeps_probabilities
        self.probabilities: list[Tensor] = []
        self._gathered: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Add a batch. logits: [B, C]. labels: int64 [B], -100: no label. ids: int64 [B]."""
        logits = logits.float()
        probabilities = logits.softmax(1)
        prediction = logits.argmax(1)
        confidence = probabilities.gather(1, prediction[:, None])[:, 0]
        in_top5 = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).any(1)
        losses = cross_entropy(logits, labels, reduction="none")
        columns = (ids, labels, prediction, losses, confidence, in_top5)
        self.parts.append(torch.stack([column.double() for column in columns], 1))
        if self.keeps_probabilities:
            self.probabilities.append(probabilities)

    def rows(self) -> Tensor:
        """Return a row for each labeled sample of this rank, float64 [n, 6]."""
        rows = torch.cat(self.parts)
        return rows[rows[:, LABEL] >= 0]

    def gather(self, world: World) -> Tensor:
        """Return the rows of the N labeled samples of all ranks, sorted by id. Collective.

        float64 [N, 6] on the CPU, with the columns id, label, prediction, loss, confidence, in
        top 5. The order does not depend on the world size, so neither do scores of the rows.
        """
        if self._gathered is None:
            self._gathered = gather_rows(self.rows(), world)
        return self._gathered

    def gather_probabilities(self, world: World) -> tuple[Tensor, Tensor]:
        """Return the probabilities, float32 [N, C], and labels, int64 [N], of all ranks' samples.

        Both are on the CPU, sorted by sample id. Collective.
        """
        all_rows = torch.cat(self.parts)
        known = all_rows[:, LABEL] >= 0
        width = self.probabilities[0].shape[1] if self.probabilities else 0
        width = max(world.all_gather_object(width))  # a rank may have no sample
        own = torch.cat([*self.probabilities, torch.empty(0, width, device=all_rows.device)])
        rows = torch.cat([all_rows[known][:, [ID, LABEL]], own[known].double()], 1)
        gathered = gather_rows(rows, world)
        return gathered[:, 2:].float(), gathered[:, 1].long()


def gather_rows(own: Tensor, world: World) -> Tensor:
    """Return all ranks' rows, sorted by the first column. own: float64 [n, k]. Collective."""
    lengths = world.all_gather_object(len(own))
    padded = torch.zeros(max(lengths), own.shape[1], dtype=own.dtype, device=own.device)
    padded[: len(own)] = own
    parts = zip(world.all_gather(padded), lengths, strict=True)
    rows = torch.cat([part[:length] for part, length in parts]).cpu()
    return rows[rows[:, 0].argsort()]


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
