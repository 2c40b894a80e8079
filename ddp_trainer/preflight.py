"""Can the nodes of a job start together? Asked on every node before torchrun, answered on all within seconds.

    python -m ddp_trainer.preflight --head=10.0.0.1 --port=29400 --nnodes=4 --node-rank=1

The head (node rank 0) listens where torchrun's store will, all others come and say who they are, and the head
tells them the verdict and frees the port. Exit 0: every node may start torchrun now; 2: one sentence on stderr says
why not. On stdout: this node's address in the job's network, for ``torchrun --local_addr``. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from ddp_trainer.config import flatten
from ddp_trainer.network import (
    StartError,
    address_towards,
    addresses,
    is_literal,
    is_loopback,
    is_own,
    resolve,
    route_to,
)
from ddp_trainer.rollcall import CalledOffError, Hello, Plan, versions
from ddp_trainer.rollcall.guest import ask_head
from ddp_trainer.rollcall.head import wait_for_nodes

USER_ERROR = 2
SHM_MB = 512
"""What NCCL may need in /dev/shm between the GPUs of a node (its manual advises 1 GB; Docker gives 64 MB)."""


def main() -> None:
    """Run the preflight of this node; exit 0, or 2 with a sentence on stderr."""
    arguments = parse()
    try:
        address = check(arguments.head, plan_of(arguments), config=frozen(arguments.config))
    except StartError as error:
        refuse(error)
    print(address)


def refuse(error: StartError) -> NoReturn:
    """Say what is wrong and exit 2. What the head has found, the head calls an error, the others only repeat."""
    print(error if isinstance(error, CalledOffError) else f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(USER_ERROR)


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m ddp_trainer.preflight")
    parser.add_argument("--head", required=True, help="name or address of node 0")
    parser.add_argument("--port", type=int, required=True, help="where torchrun's store will listen on the head")
    parser.add_argument("--nnodes", required=True, help="number of nodes: N, or MIN:MAX for an elastic job")
    parser.add_argument("--node-rank", type=int, required=True, help="this node's number, from 0")
    parser.add_argument("--timeout", type=float, default=20, help="seconds to wait for the other nodes (20)")
    parser.add_argument("--rdzv-id", help="torchrun's --rdzv_id: a rendezvous of another job is not joined")
    parser.add_argument("--config", type=Path, help="file of ddp_trainer.job freeze, compared with the head's")
    return parser.parse_args()


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the command line asks for.

    Raises:
        StartError: it makes no sense.
    """
    smallest, _, largest = arguments.nnodes.partition(":")
    few, many = (int(text) if text.isdecimal() else 0 for text in (smallest, largest or smallest))
    if not 1 <= few <= many:
        raise StartError(f"nnodes {arguments.nnodes} is no number of nodes: N, or MIN:MAX, from 1")
    if not 0 <= arguments.node_rank < many:
        raise StartError(f"node rank {arguments.node_rank} of {many} nodes: number them 0 to {many - 1}")
    if not 0 < arguments.port < 65536:
        raise StartError(f"port {arguments.port} is none: choose one from 1024 to 65535")
    return Plan(
        node_rank=arguments.node_rank, min_nodes=few, max_nodes=many, port=arguments.port,
        timeout=arguments.timeout, rdzv_id=arguments.rdzv_id,
    )  # fmt: skip


# --- this node by itself --------------------------------------------------------------------------


def check(head: str, plan: Plan, *, config: dict[str, Any]) -> str:
    """Return this node's address in the job's network, once all nodes may start.

    Raises:
        StartError: they cannot.
    """
    began = time.monotonic()
    address = head_address(head, plan)
    own = address_towards(address)
    place = f"{own} on {route_to(address) or 'an interface without a name'}"
    print(f"node {plan.node_rank} of {plan.nnodes}: {place}, head {address}:{plan.port}", file=sys.stderr, flush=True)
    hello = Hello(
        node_rank=plan.node_rank, nnodes=plan.nnodes, address=own, versions=versions(), config=config,
        fault=gpu_fault(config) or shared_memory_fault(),
    )  # fmt: skip
    if plan.node_rank == 0:
        wait_for_nodes(hello, plan)
    else:
        ask_head(hello, address, plan, deadline=began + plan.timeout)
    return own


def head_address(head: str, plan: Plan) -> str:
    """Return the address of `head`, which every node can use.

    Raises:
        StartError: it has none, or not one that others can reach, or this should be the head and is not.
    """
    address = resolve(head, timeout=min(10, plan.timeout))
    deliberate = is_literal(head) or head == "localhost"
    if plan.max_nodes > 1 and is_loopback(address) and not deliberate:
        raise StartError(own_name_fault(head, address))
    if plan.node_rank == 0 and not is_own(address):
        named = head if head == address else f"{head} ({address})"
        raise StartError(
            f"node 0 runs on the head, and {named} is none of this host's addresses "
            f"({', '.join(addresses().values())}): start node 0 there, or give this node its own rank"
        )
    return address


def own_name_fault(head: str, address: str) -> str:
    """Say that `head` is a name that means each host itself, and which address may be meant."""
    others = [its for its in addresses().values() if not is_loopback(its)]
    example = f", HEAD={others[0]} if it is this host" if others else ""
    return (
        f"head {head!r} resolves to {address} on this host, where no other node can reach it (Debian's /etc/hosts "
        f"does that to a host's own name): give its address in the network{example}, or mend /etc/hosts"
    )


def frozen(path: Path | None) -> dict[str, Any]:
    """Return the config in a file of ``ddp_trainer.job freeze``, flat."""
    return {} if path is None else flatten(json.loads(path.read_text())["config"])


def gpu_fault(config: dict[str, Any]) -> str | None:
    """Say if the frozen config asks for GPUs and this node has none."""
    if gpu_devices() or not (config.get("backend") == "nccl" or config.get("device") == "cuda"):
        return None
    asked = "backend=nccl" if config.get("backend") == "nccl" else "device=cuda"
    return f"{asked} needs a GPU and this node has none: use backend=gloo and device=cpu, or auto for both"


def gpu_devices() -> list[Path]:
    """Return the device files of this node's GPUs: NVIDIA's, or one that stands for all in WSL and of AMD's."""
    return [path for name in ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu") for path in Path("/dev").glob(name)]


def shared_memory_fault() -> str | None:
    """Say if /dev/shm is too small for what uses it: NCCL between GPUs of a node. Gloo and the loaders do not."""
    gpus = len(gpu_devices())
    try:
        size = os.statvfs("/dev/shm")
    except OSError:
        size_mb = 0
    else:
        size_mb = size.f_frsize * size.f_bavail // 2**20
    if gpus < 2 or size_mb >= SHM_MB:
        return None
    return (
        f"/dev/shm has {size_mb} MB left and NCCL wants {SHM_MB} between {gpus} GPUs: "
        "start the container with --ipc=host or --shm-size=1g"
    )


if __name__ == "__main__":
    main()
