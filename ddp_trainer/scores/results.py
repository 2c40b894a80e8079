"""The predictions of a model, sample by sample, gathered over ranks."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_trainer.distributed.process_group import World

ID, LABEL, PREDICTION, LOSS, CONFIDENCE, IN_TOP5 = range(6)
"""The columns of the rows of `SampleResults`."""


class SampleResults:
    """The predictions of a model for the samples of this rank, kept on the device, so that no batch waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.parts = [torch.empty(0, 6, dtype=torch.float64, device=device)]

    def add(self, logits: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Add a batch. logits: [B, C], labels: int64 [B], negative for a sample without a label, ids: int64 [B]."""
        logits = logits.float()
        prediction = logits.argmax(1)
        confidence = logits.softmax(1).gather(1, prediction[:, None])[:, 0]
        in_top5 = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).any(1)
        losses = cross_entropy(logits, labels, reduction="none")
        columns = (ids, labels, prediction, losses, confidence, in_top5)
        self.parts.append(torch.stack([column.double() for column in columns], 1))

    def rows(self) -> Tensor:
        """Return a row for each sample of this rank that has a label: float64 [n, 6], with the columns above."""
        rows = torch.cat(self.parts)
        return rows[rows[:, LABEL] >= 0]

    def gather(self, world: World) -> Tensor:
        """Return the rows of all ranks, sorted by id, on the CPU: float64 [N, 6]. Collective.

        The order of the rows is the same at any world size, so all scores computed from them are the same too.
        """
        own = self.rows()
        lengths = world.all_gather_object(len(own))
        padded = torch.zeros(max(lengths), own.shape[1], dtype=own.dtype, device=own.device)
        padded[: len(own)] = own
        rows = torch.cat([part[:length] for part, length in zip(world.all_gather(padded), lengths, strict=True)]).cpu()
        return rows[rows[:, ID].argsort()]
