"""Evaluation: each sample is evaluated once, by one of the ranks."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddp_trainer.data.loaders import Batch
from ddp_trainer.distributed.world import World

ID, LABEL, PREDICTION, LOSS, CONFIDENCE, IN_TOP5 = range(6)
"""The columns of the rows of `SampleResults`. PREDICTION: the index of the predicted class.

CONFIDENCE: the probability of this class. IN_TOP5: 1 if the label is one of the five most probable
classes, else 0.
"""

Metric = Callable[[Tensor, Tensor], float]
"""A function of probabilities, float32 [N, C], and labels, int64 [N], of all labeled samples."""


class MetricError(RuntimeError):
    """A metric raised an exception, did not return a number, or changed its inputs."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean loss and top-1 (0 to 1) over `count` labeled samples. `loss` is None if `count` is 0."""

    loss: float | None = None
    top1: float = 0.0
    count: int = 0


class SampleResults:
    """The predictions for this rank's samples, on the device, so that the host does not wait."""

    def __init__(self, device: torch.device, *, keeps_probabilities: bool = False) -> None:
        """keeps_probabilities: whether to keep all probabilities, for `gather_probabilities`."""
        self.parts = [torch.empty(0, 6, dtype=torch.float64, device=device)]
        self.keeps_probabilities = keeps_probabilities
        self.probabilities: list[Tensor] = []
        self._gathered: Tensor | None = None

    def add(self, logits: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Add a batch. logits: [B, C]. labels: int64 [B], -100 for no label. ids: int64 [B]."""
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
        top 5. The order of the rows does not depend on the world size, so that a sum over them is
        rounded in the same way at any world size.
        """
        if self._gathered is None:
            self._gathered = gather_rows(self.rows(), world)
        return self._gathered

    def gather_probabilities(self, world: World) -> tuple[Tensor, Tensor]:
        """Return probabilities, float32 [N, C], and labels, int64 [N], of all N labeled samples.

        Both are on the CPU, sorted by sample id. Needs ``keeps_probabilities=True``. Collective.
        """
        all_rows = torch.cat(self.parts)
        known = all_rows[:, LABEL] >= 0
        width = self.probabilities[0].shape[1] if self.probabilities else 0
        width = max(world.all_gather_object(width))  # a rank without samples does not know C
        own = torch.cat([*self.probabilities, torch.empty(0, width, device=all_rows.device)])
        rows = torch.cat([all_rows[known][:, [ID, LABEL]], own[known].double()], 1)
        gathered = gather_rows(rows, world)
        return gathered[:, 2:].float(), gathered[:, 1].long()


def gather_rows(own: Tensor, world: World) -> Tensor:
    """Return the rows of all ranks, on the CPU, sorted by the first column. Collective.

    own: the rows of this rank, float64 [n, k]; n may differ between ranks.
    """
    lengths = world.all_gather_object(len(own))
    padded = torch.zeros(max(lengths), own.shape[1], dtype=own.dtype, device=own.device)
    padded[: len(own)] = own
    parts = zip(world.all_gather(padded), lengths, strict=True)
    rows = torch.cat([part[:length] for part, length in parts]).cpu()
    return rows[rows[:, 0].argsort()]


def eager(model: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a compiled `model` runs eagerly.

    Batches of another size, or without gradients, would need another compilation.
    """
    is_compiled = getattr(model, "_compiled_call_impl", None) is not None
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


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

    dtype: the autocast dtype of matrix products and convolutions; None: no autocast.
    """
    results = SampleResults(device, keeps_probabilities=keeps_probabilities)
    model.eval()
    with eager(model):
        for batch in loader:
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = model(batch.images)
            results.add(logits, batch.labels, batch.ids)
    return results


def mean_over_ranks(results: SampleResults, world: World) -> Evaluation:
    """Return the mean loss and accuracy over the samples of all ranks. Collective."""
    rows = results.gather(world)
    if not len(rows):
        return Evaluation()
    top1 = (rows[:, LABEL] == rows[:, PREDICTION]).double().mean()
    return Evaluation(loss=float(rows[:, LOSS].mean()), top1=float(top1), count=len(rows))


def compute_metrics(
    metrics: Mapping[str, Metric], results: SampleResults, world: World
) -> dict[str, float]:
    """Return, on all ranks, the metrics by tag ``eval/<name>``; rank 0 computes them. Collective.

    Raises:
        MetricError: on rank 0 only, if a metric raises an exception, returns no number, or changes
            its inputs, which the other metrics get too.
    """
    if not metrics:
        return {}
    probabilities, labels = results.gather_probabilities(world)
    versions = (probabilities._version, labels._version)  # torch counts the changes in place
    values = {}
    if world.is_main:
        for name, metric in metrics.items():
            try:
                values[f"eval/{name}"] = float(metric(probabilities, labels))
            except Exception as error:  # because a plug-in may raise any exception
                raise MetricError(
                    f"metric={name} failed ({type(error).__name__}: {error})"
                ) from error
            if (probabilities._version, labels._version) != versions:
                raise MetricError(
                    f"metric={name} changes its probabilities or labels in place, which the other"
                    " metrics get too: change a copy, for example probabilities.clone()"
                )
    return world.broadcast_object(values)
