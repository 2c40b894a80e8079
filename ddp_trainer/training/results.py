"""The predictions of a model as one row of numbers per sample, gathered from all ranks."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_trainer.distributed.process_group import World

ID, LABEL, PREDICTION, LOSS, CONFIDENCE, IN_TOP5 = range(6)
"""Indices of the six columns in the rows that `SampleResults` returns. CONFIDENCE: probability of
the prediction.
"""


class SampleResults:
    """The predictions for the samples of this rank. They stay on the device, so that the CPU need
    not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.parts = [torch.empty(0, 6, dtype=torch.float64, device=device)]

    def add(self, logits: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Add a batch. logits: [B, C]. labels: int64 [B], -100: no label. ids: int64 [B], the
        sample ids.
        """
        logits = logits.float()
        prediction = logits.argmax(1)
        confidence = logits.softmax(1).gather(1, prediction[:, None])[:, 0]
        in_top5 = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).any(1)
        losses = cross_entropy(logits, labels, reduction="none")
        columns = (ids, labels, prediction, losses, confidence, in_top5)
        self.parts.append(torch.stack([column.double() for column in columns], 1))

    def rows(self) -> Tensor:
        """Return a row for each labeled sample of this rank, float64 [n, 6], with the columns `ID`
        to `IN_TOP5`.
        """
        rows = torch.cat(self.parts)
        return rows[rows[:, LABEL] >= 0]

    def gather(self, world: World) -> Tensor:
        """Return the rows of the N labeled samples of all ranks, sorted by id: float64 [N, 6] on
        the CPU. Collective.

        Columns: id, label, prediction, loss, confidence, in top 5. The order of the rows does not
        depend on the world size, so neither do scores computed from the rows.
        """
        own = self.rows()
        lengths = world.all_gather_object(len(own))
        padded = torch.zeros(max(lengths), own.shape[1], dtype=own.dtype, device=own.device)
        padded[: len(own)] = own
        rows = torch.cat(
            [part[:length] for part, length in zip(world.all_gather(padded), lengths, strict=True)]
        ).cpu()
        return rows[rows[:, ID].argsort()]
