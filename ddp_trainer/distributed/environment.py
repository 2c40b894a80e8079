"""The environment variables, cores, network interface and versions of this process.

This module imports no torch.

Only this module reads environment variables. Other modules may set them, and pass them on to
processes that they start.
"""

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.version import __version__

SIOCGIFADDR = 0x8915
"""The ioctl that returns the IPv4 address of a network interface, from Linux's sockios.h."""
PR_SET_PDEATHSIG = 1
"""The option of prctl for a signal when the parent process ends, from Linux's prctl.h."""
COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
FIX = (
    "start with torchrun --nproc_per_node=N --master-port=29500 -m ddp_trainer, or unset RANK and"
    " WORLD_SIZE"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The rank of this process, as torchrun numbers it, and the settings of the launch script."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    torchrun_ranks: int = 1
    """The number of ranks of the torchrun process that has started this one."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    under_torchrun: bool = False
    has_agent_store: bool = False
    """Whether a torchrun process, not rank 0, runs the rendezvous store, so that a rank can connect
    to it at any time.
    """
    is_restart: bool = False
    """Whether this rank was started before in this launch: torchrun restarted it, or SLURM requeued
    the job.
    """
    node: str = field(default_factory=socket.gethostname)
    """The name of this node: under SLURM the name that SLURM uses, else the host name."""
    error_file: str | None = None
    """The file from which torchrun reads the cause of a failure."""
    stop_file: Path | None = None
    """A graceful stop begins when this file appears: DDP_TRAINER_STOP_FILE."""
    command: str | None = None
    """The command that resumes this run, if a launch script has set it: DDP_TRAINER_COMMAND."""
    job_secret: str = field(default="", repr=False)
    """The secret that the nodes of this job share, if there is one: DDP_TRAINER_JOB_SECRET."""

    def __post_init__(self) -> None:
        require(
            self.rank < self.world_size,
            f"RANK={self.rank} must be less than WORLD_SIZE={self.world_size}: {FIX}",
        )
        require(
            self.local_rank < self.local_world_size <= self.world_size,
            f"LOCAL_RANK={self.local_rank} must be less than"
            f" LOCAL_WORLD_SIZE={self.local_world_size}, which must be at most"
            f" WORLD_SIZE={self.world_size}: {FIX}",
        )
        port = self.master_port
        require(0 < port < 2**16, f"MASTER_PORT={port} must be 1 to 65535: {FIX}")

    def record_start(self) -> None:
        """Write a file that makes `is_restart` true when torchrun starts this rank again.

        torchrun's restart count is not enough, because it omits restarts for a new node.
        """
        if marker := _start_marker(self.error_file):
            with suppress(OSError):  # a full disk must not prevent the start
                marker.write_text(str(os.getpid()))


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the `Environment` from torchrun's variables; without them, for a single process.

    Raises ConfigError if the variables are wrong, or some of them are missing.
    """
    error_file = variables.get("TORCHELASTIC_ERROR_FILE")
    stop_file = variables.get("DDP_TRAINER_STOP_FILE")
    counts = [_count(name, variables) for name in RESTART_COUNTS if variables.get(name)]
    environment = Environment(
        is_restart=any(counts) or _was_started(error_file),
        stop_file=Path(stop_file) if stop_file else None,
        command=variables.get("DDP_TRAINER_COMMAND") or None,
        job_secret=variables.get("DDP_TRAINER_JOB_SECRET", ""),
        node=variables.get("SLURMD_NODENAME") or socket.gethostname(),
        has_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
    if not _is_under_torchrun(variables):
        return environment
    ranks: dict[str, Any] = {name.lower(): _count(name, variables) for name in COUNTS}
    torchrun_ranks = ranks["local_world_size"]
    if variables.get("DDP_TRAINER_LOCAL_RANK"):
        # each rank has a torchrun of its own, which counts one rank on the node
        ranks["local_rank"] = _count("DDP_TRAINER_LOCAL_RANK", variables)
        ranks["local_world_size"] = _count("DDP_TRAINER_LOCAL_WORLD_SIZE", variables)
    return replace(
        environment,
        **ranks,
        torchrun_ranks=torchrun_ranks,
        master_addr=variables["MASTER_ADDR"],
        under_torchrun=True,
        error_file=error_file,
    )


def _is_under_torchrun(variables: Mapping[str, str]) -> bool:
    present = [name for name in ("RANK", "WORLD_SIZE") if name in variables]
    missing = [name for name in (*COUNTS, "MASTER_ADDR") if not variables.get(name)]
    if present and missing:
        text = f"{present[0]}={variables[present[0]]} is set without {', '.join(missing)}"
        raise ConfigError(f"{text}: {FIX}")
    return bool(present)


def _count(name: str, variables: Mapping[str, str]) -> int:
    text = variables[name]
    is_count = text.isascii() and text.isdecimal() and len(text) < 10
    require(is_count, f"{name}={text[:80]} must be a whole number: {FIX}")
    return int(text)


def _was_started(error_file: str | None) -> bool:
    """Return whether another process has called `record_start` for this rank before."""
    marker = _start_marker(error_file)
    return marker is not None and marker.exists() and marker.read_text() != str(os.getpid())


def _start_marker(error_file: str | None) -> Path | None:
    """Return the path of the file that `record_start` writes; None without torchrun's error file.

    Each local rank of a torchrun process has a different path, which a restart does not change.
    torchrun's error file is ``<folder of the torchrun process>/attempt_<restart count>/<local
    rank>/error.json``.
    """
    if error_file is None:
        return None
    folder = Path(error_file).parent
    attempt = folder.parent
    is_attempt = attempt.name.startswith("attempt_")
    return attempt.parent / f"started-{folder.name}" if is_attempt else None


def installed_versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks; ConfigError if a package is missing."""
    versions = {"ddp_trainer": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "torchvision"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            fix = (
                "run 'make', or use a Python that has it (set the environment variable"
                " DDP_TRAINER_PYTHON for slurm.sbatch, PYTHON for local.sh and multinode.sh)"
            )
            raise ConfigError(f"{package} is not installed in {sys.prefix}: {fix}") from None
    for decoder in ("torchcodec", "pillow"):  # other versions may decode pixels differently
        with suppress(PackageNotFoundError):
            versions[decoder] = version(decoder)
    return versions


def plugin_modules(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the modules in DDP_TRAINER_PLUGINS, a list separated by commas."""
    return [
        name.strip() for name in variables.get("DDP_TRAINER_PLUGINS", "").split(",") if name.strip()
    ]


def user_cache(variables: Mapping[str, str] = os.environ) -> Path:
    """Return this user's cache folder, for files that a run can make again."""
    return Path(os.path.expanduser(variables.get("XDG_CACHE_HOME") or "~/.cache")) / "ddp_trainer"


def c_compilers(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the C compilers that Triton looks for: CC alone if it is set."""
    return (variables["CC"],) if variables.get("CC") else ("clang", "gcc")


def starts_incomplete(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun does not wait for the torchrun processes of all nodes."""
    return variables.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1"


def visible_gpus(count: int) -> list[str]:
    """Return the first `count` entries of CUDA_VISIBLE_DEVICES, or "0", "1", … if it is not set."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in names.split(",")][:count]


def limit_spinning(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set GOMP_SPINCOUNT=1000 unless OMP_WAIT_POLICY is set. Call this before torch is imported.

    An OpenMP thread that waits for the others then releases its core after microseconds instead of
    milliseconds: otherwise two runs that share cores slow each other down by a factor of ten.
    """
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", "1000")


def end_with_launcher(variables: Mapping[str, str] = os.environ) -> None:
    """Request that Linux kills this process when torchrun, its parent, ends.

    Otherwise a signal that ends torchrun while it starts ranks could leave ranks running.
    """
    if "TORCHELASTIC_RUN_ID" in variables and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_rank(code: int) -> NoReturn:
    """End this process without Python's cleanup.

    The cleanup may abort the process if it has DDP modules, or if other ranks have ended before.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_interface(
    environment: Environment, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Set the network interface of gloo and NCCL to the one that routes to the host of rank 0.

    If all ranks are on one node, only gloo's is set, to the loopback interface. Variables that the
    user has set are kept. Raises the ConfigError of `check_interface`.
    """
    check_interface(variables)
    is_one_node = environment.world_size == environment.local_world_size
    if interface := "lo" if is_one_node else interface_towards(environment.master_addr):
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not is_one_node:
            # without =, NCCL takes the value as a prefix of names
            variables.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def check_interface(variables: Mapping[str, str] = os.environ) -> None:
    """Check the interfaces that the user has chosen for gloo.

    Raises:
        ConfigError: this node does not have such an interface, or it has no address.
    """
    known = interfaces_with_address()
    chosen = variables.get("GLOO_SOCKET_IFNAME", "")
    for name in filter(None, chosen.split(",")):
        require(
            name in known,
            f"GLOO_SOCKET_IFNAME={chosen} names no network interface of this node that has an"
            f" address: choose from {', '.join(known)}, or unset it",
        )


def interfaces_with_address() -> list[str]:
    """Return the network interfaces of this node that have an IPv4 or IPv6 address."""
    with_address = set()
    with suppress(OSError):  # a kernel without IPv6
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        with_address = {line.split()[-1] for line in lines}
    return [
        name for _, name in socket.if_nameindex() if name in with_address or ipv4_address_of(name)
    ]


def ipv4_address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface; None if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(reply[20:24])
    return None


def interface_towards(host: str) -> str | None:
    """Return the network interface that routes to `host` over IPv4; None if it is not known."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: the kernel only looks up the route
        for _, name in socket.if_nameindex():
            if ipv4_address_of(name) == probe.getsockname()[0]:
                return name
    return None
