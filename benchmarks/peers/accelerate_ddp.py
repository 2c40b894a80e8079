"""Accelerate, as in its quick tour."""
# pyright: reportMissingImports=false

import gc
from collections.abc import Iterator
from importlib.metadata import version

import torch
from accelerate import Accelerator
from job import Clock, Job, build_dataloader, build_dataset, build_model, build_optimizer, parse_job
from torch import Tensor, nn
from torch.utils.data import DataLoader


def batches(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def train(job: Job) -> Accelerator:
    accelerator = Accelerator(
        cpu=job.device == "cpu", mixed_precision="bf16" if job.precision == "bf16" else "no"
    )
    torch.manual_seed(0)
    model = build_model(job.model)
    model, optimizer, loader = accelerator.prepare(
        model, build_optimizer(model), build_dataloader(job, build_dataset(job))
    )
    criterion = nn.CrossEntropyLoss()
    clock = Clock(job)
    for images, labels in batches(loader):
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = criterion(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        if clock.tick():
            loss.item()
            clock.close_window()
        if clock.steps == job.steps:
            break
    if accelerator.is_main_process:
        clock.report(
            world_size=accelerator.num_processes, version=f"accelerate {version('accelerate')}"
        )
    accelerator.free_memory()
    return accelerator


def main() -> None:
    accelerator = train(parse_job())
    gc.collect()  # a DDP module that outlives its group may abort the interpreter at exit
    accelerator.end_training()


if __name__ == "__main__":
    main()
