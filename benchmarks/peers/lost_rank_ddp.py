"""DDP under torchrun: a lost rank restarts all ranks, which load the newest checkpoint.

One process is one rank. It appends a line for each step to a file: time, step, ids of the samples.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lost_rank_job import BATCH, NUM_STEPS, build, images_of, log_step
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

SAVE_EVERY = 50
FOLDER = Path(os.environ["FOLDER"])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model, optimizer, criterion = build()
    path = FOLDER / "checkpoint.pt"
    step = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replica = DistributedDataParallel(model)
    samples: Any = range(BATCH * NUM_STEPS)
    order = list(DistributedSampler(samples, shuffle=True))
    size = BATCH // world_size
    while step < NUM_STEPS:
        ids = order[step * size : (step + 1) * size]
        optimizer.zero_grad()
        criterion(replica(images_of(ids)), torch.tensor(ids) % 10).backward()
        optimizer.step()
        step += 1
        log_step(FOLDER, rank, step, ids)
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, FOLDER / "writing.pt")
            os.replace(FOLDER / "writing.pt", path)
    os._exit(0)


if __name__ == "__main__":
    main()
