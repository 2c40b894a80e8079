"""What the launcher told this process. The one place that reads ``RANK`` and its like; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_trainer.config import ConfigError


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
    error_file: str | None = None
    """Where torchrun looks for the cause of a failure."""

    @property
    def is_one_node(self) -> bool:
        """Say whether all ranks share this host."""
        return self.world_size == self.local_world_size


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return this process's `Environment`; without torchrun's variables, that of a lone process.

    Raises:
        ConfigError: only some of torchrun's variables are set.
    """
    if "WORLD_SIZE" not in variables and "RANK" not in variables:
        return Environment(stop_file=variables.get("DDP_TRAINER_STOP_FILE"))
    try:
        return Environment(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
            restart_count=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
            under_torchrun=True,
            master_addr=variables["MASTER_ADDR"],
            master_port=int(variables["MASTER_PORT"]),
            stop_file=variables.get("DDP_TRAINER_STOP_FILE"),
            error_file=variables.get("TORCHELASTIC_ERROR_FILE"),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the environment sets RANK or WORLD_SIZE but not all of torchrun's variables ({error}): "
            "start with torchrun --nproc_per_node=N -m ddp_trainer, or unset them for one process"
        ) from error


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity, and the container's CPU quota if lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except OSError:
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
