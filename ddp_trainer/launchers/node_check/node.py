"""Describes this node and its job; the node check compares the descriptions of all nodes."""

import hashlib
import hmac
import json
import shutil
import socket
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.differences import differing_keys, flatten_keys
from ddp_trainer.config.errors import (
    ConfigError,
    TransientError,
    config_class,
    require,
    rule,
    setting,
)
from ddp_trainer.config.schema import Device
from ddp_trainer.cores import usable_cores
from ddp_trainer.distributed.environment import (
    installed_versions,
    interface_towards,
    read_environment,
)
from ddp_trainer.launchers.job_file import read_job
from ddp_trainer.launchers.network import address_of, address_towards

SECRET = "DDP_TRAINER_JOB_SECRET"
RDZV_ID = "rdzv_id"
MAX_NODES = 65535
FITNESS_SECONDS = 60.0
"""Seconds added to `timeout` if nodes measure their speeds, because some nodes take longer."""
SHM_MIB = 512
"""Free MiB in /dev/shm that NCCL may need on a node with several GPUs. NCCL's manual advises 1 GB;
a Docker container has 64 MiB by default.
"""


@config_class
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
    """Seconds for which the nodes wait for each other."""
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
    """Seconds for which this node waits for the other nodes."""
    address: str
    versions: dict[str, str]
    """Values that must be equal on all nodes and are sent as text: versions, number of nodes."""
    config: dict[str, Any]
    """Values that must be equal on all nodes and of which digests are sent: the config, with keys
    such as ``optimizer.lr``, the secret (SECRET) and the rendezvous id (RDZV_ID).
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

        The derivation is slow on purpose, so that nobody can try many secrets or configs.
        """
        source = self.config[RDZV_ID] if self.config[SECRET] else self.config
        return hashlib.pbkdf2_hmac(
            "sha256", self._digest(source), b"ddp_trainer", iterations=200_000
        )

    def settings(self) -> dict[str, str]:
        """Return the texts that the head sends to a client: versions and 16-bit digests of values.

        The digests have no random part, so that several starts reveal no more than one start.
        """
        digests = {key: self._digest([key, value]).hex()[:4] for key, value in self.config.items()}
        return digests | self.versions

    def find_difference(self, head: dict[str, str]) -> ConfigError | None:
        """Return an error if `head`, the head's `settings`, differ from this node's, else None."""
        own = self.settings()
        keys = differing_keys(own, head)
        named = [SECRET] if SECRET in keys else keys[:8]  # another secret changes all
        text = f"other settings than on the head ({', '.join(named)})"
        for key in self.versions:
            if key in keys:
                text = f"{key} is {own[key]} here and {head.get(key)} on the head"
        return ConfigError(f"{text}: use the same on all nodes") if keys else None

    def _digest(self, value: Any) -> bytes:
        message = json.dumps(value, sort_keys=True).encode()
        return hmac.digest(self.config[SECRET].encode(), message, "sha256")


def describe_node(options: NodeCheckOptions) -> NodeInfo:
    """Return the description of this node and its job, and print the node's address to stderr.

    With check.fitness=true also measure and print the speeds of this node.

    Raises:
        ConfigError: an option is wrong, or the job file cannot be used.
        TransientError: the head's name or a route to the head is not available now.
    """
    min_nodes, max_nodes = parse_nnodes(options.nnodes)
    require(
        0 <= options.node_rank < max_nodes,
        f"node_rank={options.node_rank} must be 0 to {max_nodes - 1}",
    )
    job, run_dir = read_job(Path(options.job_file)) if options.job_file else (None, Path())
    config = flatten_keys(to_builtins(job)) if job else {}
    speeds: dict[str, float] = {}
    head = resolve_head(options.head, max_nodes)
    address = address_towards(head)
    interface = interface_towards(head) or "an interface without a name"
    where = f"{address} on {interface}, head {head}:{options.port}"
    print(f"node {options.node_rank} of {options.nnodes}: {where}", file=sys.stderr, flush=True)
    if job and job.check.fitness:
        from ddp_trainer.launchers.fitness import measure_node  # imports torch, which is slow

        speeds = measure_node(num_threads=usable_cores(), use_gpus=job.device is not Device.cpu)
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
    """Return the least and the greatest number of nodes in `text`; ConfigError if it is wrong."""
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
    """Return the address of the head.

    Raises:
        ConfigError: the name is unknown, or other nodes cannot reach the address.
        TransientError: no name server answers.
    """
    failure = f"head {name!r} does not resolve on this host"
    fix = "give its address, or a name that every node knows"
    try:
        address = address_of(name)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty
        if getattr(error, "errno", None) == socket.EAI_AGAIN:
            raise TransientError(f"{failure} (the name server does not answer): {fix}") from None
        raise ConfigError(f"{failure} (unknown name): {fix}") from None
    require(
        max_nodes == 1 or not ip_address(address).is_loopback or name in (address, "localhost"),
        f"head {name!r} resolves to {address} on this host, a loopback address that no other node"
        " can reach (Debian's /etc/hosts assigns it to the host's own name): give the head's"
        " address in the network (hostname -I lists the addresses of a host), or correct"
        " /etc/hosts",
    )
    return address


def find_gpu_error(node: NodeInfo) -> ConfigError | None:
    """Return an error if a GPU that the config needs or space in /dev/shm is missing, else None."""
    # NVIDIA has one device file per GPU; WSL (dxg), AMD (kfd) and Jetson (nvhost-gpu) have one for
    # all GPUs
    names = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")
    num_gpus = len([gpu for name in names for gpu in Path("/dev").glob(name)])
    for key, value in (("backend", "nccl"), ("device", "cuda")):
        if node.config.get(key) == value and not num_gpus:
            fix = "use backend=gloo and device=cpu, or auto for both"
            return ConfigError(f"{key} in the config needs a GPU and this node has none: {fix}")
    uses_cpus = node.config.get("device") == "cpu" or node.config.get("backend") == "gloo"
    shared_memory = Path("/dev/shm")
    size_mib = shutil.disk_usage(shared_memory).free // 2**20 if shared_memory.is_dir() else 0
    if num_gpus < 2 or uses_cpus or size_mib >= SHM_MIB:
        return None
    return ConfigError(
        f"/dev/shm has {size_mib} MiB left and NCCL needs {SHM_MIB} MiB between {num_gpus} GPUs:"
        " start the container with --ipc=host or --shm-size=1g"
    )
