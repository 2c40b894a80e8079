"""`ResidentReader`: batches of images that stay in memory, on the device where there is one."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ddp_trainer.data.dataset import ImageTensors


class ResidentReader:
    """Reads batches by index."""

    def __init__(self, images: ImageTensors, *, device: torch.device) -> None:
        self.pixels, self.labels = images.images.to(device), images.labels.to(device)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield uint8 [B, C, H, W] and int64 [B], on the device, for each int64 [B] of sample ids."""
        for ids in batches:
            on_device = ids.to(self.labels.device, non_blocking=True)
            yield self.pixels[on_device], self.labels[on_device]
