"""This node and its job, which the node check compares with the other nodes."""

import hashlib
import hmac
import json
import shutil
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import (
    ConfigError,
    TransientError,
    flatten_keys,
    require,
    rule,
    setting,
)
from ddp_trainer.config.schema import Device
from ddp_trainer.distributed.environment import (
    installed_versions,
    interface_towards,
    read_environment,
    usable_cores,
)
from ddp_trainer.launchers.job_file import read_job
from ddp_trainer.launchers.network import address_towards, resolve

SECRET = "DDP_TRAINER_JOB_SECRET"
RDZV_ID = "rdzv_id"
MAX_NODES = 65535
FITNESS_SECONDS = 60.0
"""Seconds added to `timeout` if the nodes measure their speeds, which takes some of them longer."""
SHM_MB = 512
"""Space in /dev/shm that NCCL may need for the GPUs of a node: its manual advises 1 GB, Docker has
64 MB.
"""


@dataclass(kw_only=True, slots=True)
class NodeCheckOptions:
    """The options of the command ``node-check``."""

    head: str = MISSING
    """Name or address of node 0."""
    port: int = setting(MISSING, rule("1 to 65535", lambda port: 0 < port < 2**16))
    """Port on which torchrun's store will listen on node 0."""
    nnodes: str = MISSING
    """Number of nodes: N, or MIN:MAX for an elastic job."""
    node_rank: int = MISSING
    """Number of this node, from 0."""
    timeout: float = setting(
        20.0, rule("greater than 0, and less than a day", lambda seconds: 0 < seconds < 86400)
    )
    """How many seconds the nodes wait for each other."""
    rdzv_id: str = "none"
    """The value of torchrun's --rdzv-id."""
    job_file: str | None = None
    """Job file, written by freeze; its config must be the same on all nodes."""


class PortTakenError(TransientError):
    """Another program listens at the head's port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """This node, and the job to which it belongs."""

    node_rank: int
    min_nodes: int
    max_nodes: int
    head: tuple[str, int]
    """Address of node 0, and the port for torchrun's store."""
    timeout: float
    """Seconds for which a node waits for the others."""
    address: str
    versions: dict[str, str]
    """Values that must be equal on all nodes and are sent: versions and the number of nodes."""
    config: dict[str, Any]
    """Values that must be equal on all nodes, by key such as ``optimizer.lr``: the config, SECRET
    and RDZV_ID.
    """
    speeds: dict[str, float]
    """Measured speeds of this node by name; higher is faster. Empty with check.fitness=false."""
    name: str
    """The name of this node: in a SLURM job its name in SLURM, else its host name."""
    run_dir: Path
    """The run directory of the job, in which the head writes the names of slow nodes."""

    def named(self, error: ConfigError | TransientError) -> ConfigError | TransientError:
        """Return an error of the same type that begins with the rank and address of this node."""
        return type(error)(f"node {self.node_rank} ({self.address}): {error}")

    def port_taken(self) -> PortTakenError:
        """Return the error that says that another program uses the head's port."""
        return PortTakenError(
            f"port {self.head[1]} is taken on the head {self.head[0]} by another program or job (ss"
            " -ltnp on the head names it): end it, or choose another port on all nodes"
        )

    def key(self) -> bytes:
        """Return the key that signs messages.

        Deriving it is slow, so that nobody can try many secrets or configs.
        """
        source = self.config[RDZV_ID] if self.config[SECRET] else self.config
        return hashlib.pbkdf2_hmac(
            "sha256", self._digest(source), b"ddp_trainer", iterations=200_000
        )

    def settings(self, salt: str) -> dict[str, str]:
        """Return what the head sends to any client: versions, and 16-bit digests of all values."""
        digests = {
            key: self._digest([salt, key, value]).hex()[:4] for key, value in self.config.items()
        }
        return digests | self.versions | {"salt": salt}

    def check_settings(self, head: dict[str, str]) -> None:
        """Raise ConfigError if `head`, the `settings` of the head, are not those of this node."""
        own = self.settings(head.get("salt", ""))
        keys = [key for key in own | head if own.get(key) != head.get(key)]
        if not keys:
            return
        if version := next((key for key in keys if key in self.versions), None):
            text = f"{version} is {own[version]} here and {head.get(version)} on the head"
        else:
            named = [SECRET] if SECRET in keys else keys[:8]  # it changes all digests
            text = f"other settings than on the head ({', '.join(named)})"
        raise ConfigError(f"{text}: use the same on all nodes")

    def _digest(self, value: Any) -> bytes:
        message = json.dumps(value, sort_keys=True).encode()
        return hmac.digest(self.config[SECRET].encode(), message, "sha256")


def describe_node(options: NodeCheckOptions) -> NodeInfo:
    """Return this node and its job, and print its address.

    ConfigError if an option is wrong, TransientError if there is no route to the head.
    """
    min_nodes, max_nodes = parse_nnodes(options.nnodes)
    require(
        0 <= options.node_rank < max_nodes,
        f"node_rank={options.node_rank} must be 0 to {max_nodes - 1}",
    )
    config: dict[str, Any] = {}
    speeds: dict[str, float] = {}
    run_dir = Path()
    job = None
    if options.job_file is not None:
        job, run_dir = read_job(Path(options.job_file))
        config = flatten_keys(to_builtins(job))
    head = resolve_head(options.head, max_nodes)
    address = address_towards(head)
    interface = interface_towards(head) or "an interface without a name"
    where = f"{address} on {interface}, head {head}:{options.port}"
    print(f"node {options.node_rank} of {options.nnodes}: {where}", file=sys.stderr, flush=True)
    if job is not None and job.check.fitness:
        from ddp_trainer.launchers.fitness import measure_node  # imports torch, which is slow

        use_gpus = job.device is not Device.cpu
        speeds = measure_node(num_threads=usable_cores(), use_gpus=use_gpus)
    environment = read_environment()
    return NodeInfo(
        node_rank=options.node_rank,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        head=(head, options.port),
        timeout=options.timeout + (FITNESS_SECONDS if speeds else 0),
        address=address,
        name=environment.node,
        versions=installed_versions() | {"nnodes": options.nnodes},
        config=config | {RDZV_ID: options.rdzv_id, SECRET: environment.job_secret},
        speeds=speeds,
        run_dir=run_dir,
    )


def parse_nnodes(text: str) -> tuple[int, int]:
    """Return the least and the greatest number of nodes of ``N`` or ``MIN:MAX``."""
    smallest, _, largest = text.partition(":")
    least, most = (
        int(part) if len(part) < 6 and part.isdecimal() else 0
        for part in (smallest, largest or smallest)
    )
    require(
        1 <= least <= most <= MAX_NODES,
        f"nnodes={text} must be N or MIN:MAX, from 1 to {MAX_NODES}",
    )
    return least, most


def resolve_head(name: str, max_nodes: int) -> str:
    """Return the address of the head; ConfigError if other nodes cannot reach this address."""
    address = resolve(name)
    require(
        max_nodes == 1 or not ip_address(address).is_loopback or name in (address, "localhost"),
        f"head {name!r} resolves to {address} on this host, a loopback address that no other node"
        " can reach (Debian's /etc/hosts assigns it to the host's own name): give the head's"
        " address in the network (hostname -I lists the addresses of a host), or correct"
        " /etc/hosts",
    )
    return address


def find_gpu_error(node: NodeInfo) -> ConfigError | None:
    """Return an error if this node lacks a GPU that the config needs, or shared memory for NCCL."""
    # NVIDIA has one device file per GPU; WSL (dxg), AMD (kfd) and Jetson (nvhost-gpu) have one for
    # all GPUs
    names = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")
    num_gpus = sum(len(list(Path("/dev").glob(name))) for name in names)
    for key, value in (("backend", "nccl"), ("device", "cuda")):
        if node.config.get(key) == value and not num_gpus:
            fix = "use backend=gloo and device=cpu, or auto for both"
            return ConfigError(f"{key} in the config needs a GPU and this node has none: {fix}")
    if num_gpus < 2 or node.config.get("device") == "cpu" or node.config.get("backend") == "gloo":
        return None
    shared_memory = Path("/dev/shm")
    size_mb = shutil.disk_usage(shared_memory).free // 2**20 if shared_memory.is_dir() else 0
    if size_mb >= SHM_MB:
        return None
    return ConfigError(
        f"/dev/shm has {size_mb} MB left and NCCL needs {SHM_MB} MB between {num_gpus} GPUs: start"
        " the container with --ipc=host or --shm-size=1g"
    )
