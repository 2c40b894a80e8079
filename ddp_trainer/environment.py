"""What the launcher told this process. The one place that reads ``RANK`` and its like; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_trainer.config import ConfigError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """This process's place among its peers, as torchrun numbers them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restart_count: int = 0
    under_torchrun: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    stop_file: str | None = None
    """Where a soft stop may be asked for by making a file: DDP_TRAINER_STOP_FILE."""
    command: str | None = None
    """The command that goes on with this run, if a launch script knows better: DDP_TRAINER_COMMAND."""
    error_file: str | None = None
    """Where torchrun looks for the cause of a failure."""

    @property
    def is_one_node(self) -> bool:
        """Say whether all ranks share this host."""
        return self.world_size == self.local_world_size


COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
WAY_OUT = "start with torchrun --nproc_per_node=N -m ddp_trainer, or unset RANK and WORLD_SIZE for one process"


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return this process's `Environment`; without torchrun's variables, that of a lone process.

    Raises:
        ConfigError: only some of torchrun's variables are set, or one makes no sense.
    """
    if "WORLD_SIZE" not in variables and "RANK" not in variables:
        return Environment(
            stop_file=variables.get("DDP_TRAINER_STOP_FILE"), command=variables.get("DDP_TRAINER_COMMAND")
        )
    if missing := [name for name in (*COUNTS, "MASTER_ADDR") if not variables.get(name)]:
        found = "RANK" if "RANK" in variables else "WORLD_SIZE"
        raise ConfigError(f"{found}={variables[found]} is set and {', '.join(missing)} not: {WAY_OUT}")
    rank, world_size, local_rank, local_world_size, port = (_count(name, variables) for name in COUNTS)
    for name, place, size in (("RANK", rank, world_size), ("LOCAL_RANK", local_rank, local_world_size)):
        require(place < size <= world_size, f"{name}={place} of {size} ranks out of {world_size}: {WAY_OUT}")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        restart_count=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        under_torchrun=True,
        master_addr=variables["MASTER_ADDR"],
        master_port=port,
        stop_file=variables.get("DDP_TRAINER_STOP_FILE"),
        command=variables.get("DDP_TRAINER_COMMAND"),
        error_file=variables.get("TORCHELASTIC_ERROR_FILE"),
    )


def _count(name: str, variables: Mapping[str, str]) -> int:
    require(variables[name].isdecimal(), f"{name}={variables[name]} must be a whole number: {WAY_OUT}")
    return int(variables[name])


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity, and the container's CPU quota if lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except OSError:
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
