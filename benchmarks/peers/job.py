"""The parts that the peers share: command line, data set, models and clock.

Nothing is imported from ddp_trainer, because that would count as start-up time of the peers.
"""

import argparse
import gzip
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import models, transforms

MEAN = 0.2860
STD = 0.3530


@dataclass(frozen=True)
class Job:
    """The command line of a peer."""

    data: Path
    """Folder with the gzipped IDX files of Fashion-MNIST."""
    model: str
    steps: int
    window: int
    """Steps between two log points; the rate is the median over these windows without the first."""
    batch_size: int
    """Of a rank."""
    workers: int
    precision: str
    device: str
    """cpu, or cuda: a GPU a rank."""
    launched: float
    """Unix time at which the launcher was started."""


def parse_job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=("lenet", "resnet18"), default="lenet")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="of a rank")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--launched", type=float, default=time.time())
    job = Job(**vars(parser.parse_args()))
    if job.steps < 2 * job.window:
        parser.error(
            f"--steps={job.steps} must be at least two windows of {job.window}: the first is a"
            " warm-up"
        )
    return job


class FashionMNIST(Dataset):
    """torchvision's FashionMNIST for gzipped files: each sample is a PIL image that goes through
    `transform`.
    """

    def __init__(self, folder: Path, transform: transforms.Compose) -> None:
        with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
            self.images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
            self.labels = np.frombuffer(file.read(), np.uint8, offset=8).tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def place(job: Job, local_rank: int) -> torch.device:
    """Return the device of a rank, chosen for this process."""
    if job.device == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def build_dataset(job: Job) -> FashionMNIST:
    """Return the training set with the augmentation of the job."""
    return FashionMNIST(
        job.data,
        transforms.Compose(
            [
                transforms.RandomCrop(28, padding=2),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        ),
    )


def build_dataloader(
    job: Job, dataset: FashionMNIST, sampler: Sampler[int] | None = None
) -> DataLoader:
    """Return a loader of the batches of a rank; without `sampler` it shuffles, and the framework
    shards it.
    """
    return DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        pin_memory=job.device == "cuda",
        drop_last=True,
    )


def build_model(name: str) -> nn.Module:
    """Return the LeNet or ResNet-18 of ddp_trainer, for grey images of 28×28 pixels and 10
    classes.
    """
    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 20, kernel_size=3),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(20, 50, kernel_size=5),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(50 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    model = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()  # type: ignore[assignment]  # torchvision annotates the attribute
    return model


def build_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)


class Clock:
    """Measures the time until the first step ends, and the duration of each window of steps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps = 0
        self.windows = []
        self.first_step_seconds = 0.0
        self.began = time.perf_counter()

    def tick(self) -> bool:
        """Count a step. Return whether this is a log point, at which the loss is read."""
        self.steps += 1
        if self.steps == 1:
            self.first_step_seconds = time.time() - self.job.launched
        return self.steps % self.job.window == 0

    def close_window(self) -> None:
        """Record the duration of the window, after the loss was read."""
        now = time.perf_counter()
        self.windows.append(now - self.began)
        self.began = now

    def report(self, *, world_size: int, version: str) -> None:
        """Print the result as one line of JSON."""
        images = self.job.window * self.job.batch_size * world_size
        rates = [images / seconds for seconds in self.windows[1:]]
        result = {
            "images_per_second": statistics.median(rates),
            "first_step_seconds": self.first_step_seconds,
            "num_threads": torch.get_num_threads(),
            "world_size": world_size,
            "version": version,
        }
        print(json.dumps(result), flush=True)
