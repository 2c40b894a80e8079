"""The predictions of a model as one row of numbers per sample, gathered from all ranks."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_trainer.distributed.process_group import World

ID, LABEL, PREDICTION, LOSS, CONFIDENCE, IN_TOP5 = range(6)
"""The columns of the rows of `SampleResults`. CONFIDENCE: the probability of the prediction."""


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
