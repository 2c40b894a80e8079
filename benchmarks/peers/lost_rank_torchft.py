"""torchft: each process is a replica group of its own, and the others go on without a lost one.

It appends a line for each committed step to a file: time, step, ids of the samples.

Source: torchft, train_ddp.py, the example of its repository.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lost_rank_job import BATCH, NUM_STEPS, build, images_of, log_step
from torch.distributed import TCPStore
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

FOLDER = Path(os.environ["FOLDER"])
SLOT = int(os.environ["SLOT"])
NUM_SLOTS = int(os.environ["NUM_SLOTS"])


def main() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model, optimizer, criterion = build()

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"slot_{SLOT}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    replica = DistributedDataParallel(manager, model)
    stepper = Optimizer(manager, optimizer)
    sampler = DistributedSampler(
        range(BATCH * NUM_STEPS),
        replica_rank=SLOT,
        num_replica_groups=NUM_SLOTS,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    order = list(sampler)
    size = BATCH // NUM_SLOTS
    place = 0
    while manager.current_step() < NUM_STEPS:
        ids = order[place : place + size]
        place += size
        if len(ids) < size:
            break
        stepper.zero_grad()
        criterion(replica(images_of(ids)), torch.tensor(ids) % 10).backward()
        before = manager.current_step()
        stepper.step()
        if manager.current_step() > before:
            log_step(FOLDER, SLOT, manager.current_step(), ids)
    os._exit(0)


if __name__ == "__main__":
    main()
