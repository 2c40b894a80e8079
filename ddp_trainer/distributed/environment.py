"""The environment variables, cores and network interface of this process. Imports no torch.

No other module reads environment variables.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_trainer.config.errors import ConfigError, require

SIOCGIFADDR = 0x8915
"""The ioctl that returns the IPv4 address of a network interface, from Linux's sockios.h."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The rank of this process, as torchrun numbers it, and the settings of the launch script."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    is_restart: bool = False
    """This launch has started this rank before: torchrun restarted it, or SLURM requeued the job."""
    under_torchrun: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    stop_file: str | None = None
    """A graceful stop begins when this file appears: DDP_TRAINER_STOP_FILE."""
    command: str | None = None
    """The command that continues this run, where a launch script knows it: DDP_TRAINER_COMMAND."""
    error_file: str | None = None
    """The file from which torchrun reads the cause of a failure."""

    @property
    def is_one_node(self) -> bool:
        """Return whether all ranks share this host."""
        return self.world_size == self.local_world_size

    def record_start(self) -> None:
        """Record this start for `is_restart` of later ones, because torchrun counts only restarts after a failure.

        For example, it does not count the restart in which an elastic job takes in another node.
        """
        if marker := _start_marker(self.error_file):
            with suppress(OSError):  # a full disk must not end a start
                marker.write_text(str(os.getpid()))


COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
FIX = "start with torchrun --nproc_per_node=N -m ddp_trainer, or unset RANK and WORLD_SIZE for one process"


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the `Environment` of this process; without torchrun's variables, that of a single process.

    Raises:
        ConfigError: only some of torchrun's variables are set, or one is not valid.
    """
    stop_file, command = (variables.get(f"DDP_TRAINER_{name}") or None for name in ("STOP_FILE", "COMMAND"))
    error_file = variables.get("TORCHELASTIC_ERROR_FILE")
    is_restart = _was_started_before(error_file) or any(
        _count(name, variables) > 0 for name in RESTART_COUNTS if variables.get(name)
    )
    if "WORLD_SIZE" not in variables and "RANK" not in variables:
        return Environment(is_restart=is_restart, stop_file=stop_file, command=command)
    if missing := [name for name in (*COUNTS, "MASTER_ADDR") if not variables.get(name)]:
        present = "RANK" if "RANK" in variables else "WORLD_SIZE"
        raise ConfigError(f"{present}={variables[present]} is set and {', '.join(missing)} not: {FIX}")
    rank, world_size, local_rank, local_world_size, port = (_count(name, variables) for name in COUNTS)
    require(rank < world_size, f"RANK={rank} must be less than WORLD_SIZE={world_size}: {FIX}")
    require(
        local_rank < local_world_size <= world_size,
        f"LOCAL_RANK={local_rank} must be less than LOCAL_WORLD_SIZE={local_world_size}, which must be at most "
        f"WORLD_SIZE={world_size}: {FIX}",
    )
    require(0 < port < 2**16, f"MASTER_PORT={port} must be 1 to 65535: {FIX}")
    return Environment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        is_restart=is_restart,
        under_torchrun=True,
        master_addr=variables["MASTER_ADDR"],
        master_port=port,
        stop_file=stop_file,
        command=command,
        error_file=error_file,
    )


def _count(name: str, variables: Mapping[str, str]) -> int:
    text = variables[name]
    is_count = text.isascii() and text.isdecimal() and len(text) < 10
    require(is_count, f"{name}={text[:80]} must be a whole number: {FIX}")
    return int(text)


def _start_marker(error_file: str | None) -> Path | None:
    """Return the path of the marker of `record_start`: one for each torchrun process and local rank.

    torchrun's error file is ``<folder of the torchrun process>/attempt_<restart count>/<local rank>/error.json``.
    """
    if error_file is None or not (attempt := Path(error_file).parent.parent).name.startswith("attempt_"):
        return None
    return attempt.parent / f"started-{Path(error_file).parent.name}"


def _was_started_before(error_file: str | None) -> bool:
    marker = _start_marker(error_file)
    return marker is not None and marker.exists() and marker.read_text() != str(os.getpid())


def plugin_modules(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the modules in DDP_TRAINER_PLUGINS, which is a list with commas."""
    return [name.strip() for name in variables.get("DDP_TRAINER_PLUGINS", "").split(",") if name.strip()]


def job_secret(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the secret that the nodes of this job share: DDP_TRAINER_JOB_SECRET."""
    return variables.get("DDP_TRAINER_JOB_SECRET") or None


def visible_gpus(count: int, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the `count` GPUs that this process may use, in the form of CUDA_VISIBLE_DEVICES."""
    names = variables.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in names.split(",")][:count] if names else [str(number) for number in range(count)]


def torchrun_variables(num_threads: int) -> dict[str, str]:
    """Return the environment variables to start torchrun with: without OMP_NUM_THREADS it prints a warning."""
    return {"OMP_NUM_THREADS": str(num_threads)}


def limit_spinning(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set GOMP_SPINCOUNT=1000 unless OMP_WAIT_POLICY is set. Call this before torch is imported.

    An OpenMP thread that waits for the others then releases its core after microseconds instead of milliseconds:
    otherwise two runs that share cores slow each other down by a factor of ten.
    """
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", "1000")


def set_interface(environment: Environment, variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the network interface of gloo and NCCL to the one that routes to rank 0, unless the user has chosen one."""
    interface = "lo" if environment.is_one_node else interface_towards(environment.master_addr)
    if interface is not None:
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not environment.is_one_node:
            variables.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface that routes to `host` over IPv4; None if it is not known."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: the kernel only looks up the route
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == probe.getsockname()[0]:
                    return name
    return None


def usable_cores() -> int:
    """Return the number of cores this process may use: its affinity, and the container's CPU quota if lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
