"""``node-check``: check that the nodes of a job can start together, and print this node's address
in their network.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from omegaconf import MISSING

from ddp_trainer.commands.command_line import errors_as_exit_codes
from ddp_trainer.commands.options import parse_options
from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import ConfigError, flatten_keys, require, rule
from ddp_trainer.config.schema import Device
from ddp_trainer.distributed.environment import (
    installed_versions,
    interface_towards,
    read_environment,
    usable_cores,
)
from ddp_trainer.launchers.job_file import read_job
from ddp_trainer.launchers.network import address_towards, resolve
from ddp_trainer.launchers.node_check import RDZV_ID, SECRET, NodeInfo
from ddp_trainer.launchers.node_check.client import ask_head
from ddp_trainer.launchers.node_check.server import wait_for_nodes

MAX_NODES = 65535
FITNESS_SECONDS = 60.0
"""Seconds that are added to `timeout` if the nodes measure their speeds first, which may take
longer on one node.
"""
SHM_MB = 512
"""Space that NCCL may need in /dev/shm for the GPUs of a node; NCCL's manual advises 1 GB, Docker
gives 64 MB.
"""


@dataclass(kw_only=True, slots=True)
class NodeCheckOptions:
    """The options of the command."""

    head: str = MISSING
    """Name or address of node 0."""
    port: int = field(default=MISSING, metadata=rule("1 to 65535", lambda port: 0 < port < 2**16))
    """Port on which torchrun's store will listen on node 0."""
    nnodes: str = MISSING
    """Number of nodes: N, or MIN:MAX for an elastic job."""
    node_rank: int = MISSING
    """Number of this node, from 0."""
    timeout: float = field(
        default=20.0, metadata=rule("greater than 0, and less than a day", lambda s: 0 < s < 86400)
    )
    """How many seconds the nodes wait for each other."""
    rdzv_id: str = "none"
    """The value of torchrun's --rdzv-id."""
    job_file: str | None = None
    """Job file, written by freeze; its config must be the same on all nodes."""


def main(words: Sequence[str]) -> None:
    """Print this node's address if all nodes can start; else exit with 2 for wrong input, 1 if a
    retry may succeed.
    """
    with errors_as_exit_codes():
        options, rest = parse_options(
            NodeCheckOptions, words, usage="node-check option=value …", description=__doc__
        )
        require(not rest, f"{' '.join(rest)} is not an option of node-check: --help lists them")
        node = describe_node(options)
        os.environ["TORCH_CPP_LOG_LEVEL"] = (
            "FATAL"  # or torch prints stack traces when another program has the port
        )
        asyncio.run((ask_head if node.node_rank else wait_for_nodes)(node, find_gpu_error(node)))
    print(node.address)


def describe_node(options: NodeCheckOptions) -> NodeInfo:
    """Return this node and its job as `NodeInfo`. ConfigError: a wrong option; TransientError: no
    route to the head.
    """
    smallest, _, largest = options.nnodes.partition(":")
    min_nodes, max_nodes = (
        int(text) if len(text) < 6 and text.isdecimal() else 0
        for text in (smallest, largest or smallest)
    )
    require(
        1 <= min_nodes <= max_nodes <= MAX_NODES,
        f"nnodes={options.nnodes} must be N or MIN:MAX, from 1 to {MAX_NODES}",
    )
    require(
        0 <= options.node_rank < max_nodes,
        f"node_rank={options.node_rank} must be 0 to {max_nodes - 1}",
    )
    job, run_dir = (None, Path()) if options.job_file is None else read_job(Path(options.job_file))
    config = {} if job is None else flatten_keys(to_builtins(job))
    head = resolve(options.head, timeout=min(10, options.timeout))
    require(
        max_nodes == 1 or not ip_address(head).is_loopback or options.head in (head, "localhost"),
        f"head {options.head!r} resolves to {head} on this host, a loopback address that no other"
        " node can reach (Debian's /etc/hosts assigns it to the host's own name): give the head's"
        " address in the network (hostname -I lists the addresses of a host), or correct"
        " /etc/hosts",
    )
    address = address_towards(head)
    interface = interface_towards(head) or "an interface without a name"
    where = f"{address} on {interface}, head {head}:{options.port}"
    print(f"node {options.node_rank} of {options.nnodes}: {where}", file=sys.stderr, flush=True)
    speeds = measure_speeds(job.device) if job is not None and job.check.fitness else {}
    timeout = options.timeout + (FITNESS_SECONDS if speeds else 0)
    env = read_environment()
    return NodeInfo(
        node_rank=options.node_rank,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        head=(head, options.port),
        timeout=timeout,
        address=address,
        name=env.node,
        versions=installed_versions() | {"nnodes": options.nnodes},
        config=config | {RDZV_ID: options.rdzv_id, SECRET: env.job_secret},
        speeds=speeds,
        run_dir=run_dir,
    )


def measure_speeds(device: Device) -> dict[str, float]:
    """Measure, print and return this node's "matrix product" (GFLOP/s) and "memory bandwidth"
    (GB/s).

    Each speed is the lowest of the node's GPUs; without GPUs or with device=cpu, that of all usable
    cores together.
    """
    # imports torch, which takes seconds
    from ddp_trainer.launchers.fitness import (
        UNITS,
        measure_node,
    )

    speeds = measure_node(num_threads=usable_cores(), use_gpus=device is not Device.cpu)
    text = ", ".join(f"{name} {speed:,.1f} {UNITS[name]}" for name, speed in speeds.items())
    print(f"fitness of this node: {text}", file=sys.stderr, flush=True)
    return speeds


def find_gpu_error(node: NodeInfo) -> ConfigError | None:
    """Return an error if this node lacks a GPU that the config needs, or the space in /dev/shm for
    NCCL; else None.
    """
    # NVIDIA has one device file per GPU; WSL (dxg), AMD (kfd) and Jetson (nvhost-gpu) have one for
    # all GPUs
    num_gpus = sum(
        len(list(Path("/dev").glob(name))) for name in ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")
    )
    for key, value in (("backend", "nccl"), ("device", "cuda")):
        if node.config.get(key) == value and not num_gpus:
            fix = "use backend=gloo and device=cpu, or auto for both"
            return ConfigError(f"{key} in the config needs a GPU and this node has none: {fix}")
    size_mb = shutil.disk_usage("/dev/shm").free // 2**20 if Path("/dev/shm").is_dir() else 0
    uses_nccl = node.config.get("device") != "cpu" and node.config.get("backend") != "gloo"
    if uses_nccl and num_gpus >= 2 and size_mb < SHM_MB:
        fix = "start the container with --ipc=host or --shm-size=1g"
        return ConfigError(
            f"/dev/shm has {size_mb} MB left and NCCL needs {SHM_MB} MB between {num_gpus} GPUs:"
            f" {fix}"
        )
    return None
