"""The job of `lost_rank.py`: a LeNet on random images, and the line of a step."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_trainer.config.models import LeNetConfig
from ddp_trainer.models import build_model

BATCH = 240
NUM_STEPS = 600

torch.set_num_threads(1)
PIXELS = torch.randn(BATCH * 10, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def build() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    model = build_model(LeNetConfig(), image_shape=(1, 28, 28), num_classes=10)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), nn.CrossEntropyLoss()


def images_of(ids: Sequence[int]) -> Tensor:
    return PIXELS[torch.tensor(ids) % len(PIXELS)]


def log_step(folder: Path, slot: int, step: int, ids: Sequence[int]) -> None:
    with open(folder / f"{slot}-{os.getpid()}.txt", "a") as file:
        file.write(f"{time.time():.3f} {step} {','.join(map(str, ids))}\n")
