"""Train with DDP in a plain loop over the batches of ddp_trainer, to measure what the trainer of
ddp_trainer costs.

Two settings of DDP differ from those of ddp_trainer: the buckets have torch's default size, and
rank 0 sends its buffers to all ranks before each forward pass (a LeNet has none).
"""

import gc
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from job import MEAN, STD, Clock, Job, build_model, parse_job, place
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddp_trainer.config.images import AugmentConfig
from ddp_trainer.data.augmentation import Augmentation, Normalize
from ddp_trainer.data.datasets.idx import read_split
from ddp_trainer.data.loaders import Batch, ResidentReader, TrainLoader
from ddp_trainer.data.sampler import GlobalBatchSampler


def batches(loader: TrainLoader) -> Iterator[Batch]:
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def train(job: Job) -> None:
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = place(job, int(os.environ["LOCAL_RANK"]))
    layout = torch.channels_last
    torch.backends.cudnn.benchmark = True  # as ddp_trainer does
    torch.manual_seed(0)
    images = read_split(job.data, "train")
    loader = TrainLoader(
        ResidentReader(images, device=device),
        sampler=GlobalBatchSampler(
            len(images),
            global_batch_size=job.batch_size * world_size,
            rank=rank,
            world_size=world_size,
            seed=0,
        ),
        augmentation=Augmentation(
            AugmentConfig(random_crop_padding=2, random_hflip=True), height=28, width=28, seed=0
        ),
        normalize=Normalize([MEAN], [STD], device=device, memory_format=layout),
        device=device,
        num_classes=10,
    )
    model = build_model(job.model).to(device).to(memory_format=layout)
    device_ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True
    )
    clock = Clock(job)
    for batch in batches(loader):
        with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"):
            logits = model(batch.images)
        loss = cross_entropy(logits.float(), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
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
