"""DistributedDataParallel with a DataLoader, as in the tutorials of PyTorch.

Source: PyTorch tutorials, "Getting Started with Distributed Data Parallel" and "Multi GPU training
with DDP".
"""

import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from job import (
    Clock,
    Job,
    build_dataloader,
    build_dataset,
    build_model,
    build_optimizer,
    parse_job,
    place,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def batches(loader: DataLoader, sampler: DistributedSampler) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(job: Job) -> None:
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = place(job, int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    dataset = build_dataset(job)
    sampler = DistributedSampler(dataset)
    loader = build_dataloader(job, dataset, sampler)
    model = DistributedDataParallel(
        build_model(job.model).to(device),
        device_ids=[device.index] if device.type == "cuda" else None,
    )
    optimizer = build_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    clock = Clock(job)
    for images, labels in batches(loader, sampler):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"):
            loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        if clock.tick():
            loss.item()
            clock.close_window()
        if clock.steps == job.steps:
            break
    if rank == 0:
        clock.report(world_size=world_size, version=f"torch {torch.__version__}")


def main() -> None:
    job = parse_job()
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    train(job)
    gc.collect()  # a DDP module that outlives its group may abort the interpreter at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
