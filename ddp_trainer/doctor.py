"""Is this machine, or this whole job's set of machines, fit to train? A table of what is there, and a verdict.

    python -m ddp_trainer.doctor                               # this host
    torchrun --nproc_per_node=2 -m ddp_trainer.doctor          # the ranks of a job, on all its nodes
    launch/multinode.sh doctor                                 # the same, as multinode.sh would start them

Takes the settings of a run (key=value: device, backend, output_dir …). Exit 0: ready; 2: not, and why.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from ddp_trainer.command_line import USER_ERROR, errors_as_exit_codes, refuse
from ddp_trainer.composition import resolve as resolve_config
from ddp_trainer.config import Config, config_dir, register_configs
from ddp_trainer.distributed import World, connected
from ddp_trainer.environment import Environment, read_environment, usable_cores
from ddp_trainer.network import is_loopback, resolve, route_to
from ddp_trainer.rollcall import CLOCK_SECONDS, versions

MB = 2**20
RANK_MB = 500
"""Memory a rank takes before it has any data: 390 MB were measured, with torch's CUDA build."""
SLOW_DISK_MB = 50
"""Below this many MB/s a checkpoint of ResNet-18 (90 MB with its optimizer) takes seconds."""
SLOW_LINK_MB = 100
"""All-reduce below this many MB/s: ResNet-18's gradients (45 MB) then take half a second a step."""
SKEW_SECONDS = 1.0


@dataclass(frozen=True)
class Row:
    """A line of the table; `advice` says what is wrong and what to do, `fatal` whether training would fail of it."""

    what: str
    found: str
    advice: str = ""
    fatal: bool = False


def main() -> None:
    """Examine, print table and verdict on rank 0, and exit with 0 or 2 on all."""
    arguments, overrides = parse()
    try:
        config = compose_config(overrides)
    except Exception as error:  # Hydra's own come in many kinds
        refuse(error)
    with errors_as_exit_codes():
        run_dir = arguments.run_dir or Path(config.output_dir).expanduser() / config.name
        environment = read_environment()
        with connected(config, environment) as world:
            rows = examine(world, environment, run_dir=run_dir, size_mb=arguments.size_mb)
        if world.is_main:
            print_table(rows)
            print(verdict(rows, world))
    sys.exit(USER_ERROR if any(row.fatal for row in rows) else 0)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return the doctor's own arguments, and the settings of the run."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_trainer.doctor", usage="%(prog)s [--run-dir DIR] [--size-mb N] [key=value …]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--run-dir", type=Path, help="where the disk is measured (the run's directory)")
    parser.add_argument("--size-mb", type=int, default=25, help="size of the all-reduce measured (25, a DDP bucket)")
    return parser.parse_known_args()


def compose_config(overrides: list[str]) -> Config:
    """Return the config that a run with `overrides` would have."""
    register_configs()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return resolve_config(compose("config", overrides))


def examine(world: World, environment: Environment, *, run_dir: Path, size_mb: int) -> list[Row]:
    """Return what was found, the same on every rank. Collective: every rank must call this."""
    latency = world.broadcast(allreduce_seconds(world, numel=1, times=100))
    transfer = world.broadcast(allreduce_seconds(world, numel=size_mb * MB // 4, times=5))
    offsets = clock_offsets(world)
    ranks = world.gather(local_facts(environment))
    nodes = {rank["host"]: rank for rank in reversed(ranks)}
    return [
        version_row(ranks),
        Row("GPU, driver", agreed(nodes, lambda node: node["gpus"] or "none")),
        cores_row(nodes, world),
        memory_row(nodes),
        Row("/dev/shm", agreed(nodes, lambda node: f"{node['shm_mb']:,} MB")),
        Row(**world.broadcast(asdict(disk_row(run_dir)) if world.is_main else {})),
        group_row(world, environment, nodes),
        *transfer_rows(world, latency=latency, transfer=transfer, size_mb=size_mb),
        clock_row(offsets, ranks),
    ]


def agreed(nodes: dict[str, dict[str, Any]], say: Callable[[dict[str, Any]], str]) -> str:
    """Return what is said of every node: once if it is the same of all, else node by node."""
    said = {name: say(node) for name, node in nodes.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values())) + (f" on each of {len(nodes)} nodes" if len(nodes) > 1 else "")
    return "; ".join(f"{name}: {what}" for name, what in said.items())


# --- a rank and its host --------------------------------------------------------------------------


def local_facts(environment: Environment) -> dict[str, Any]:
    """Return what this rank sees of its host, as JSON holds it."""
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").exists() else None
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "gpus": gpus_here(),
        "cores": usable_cores(),
        "ranks": environment.local_world_size,
        "memory_mb": available_memory_mb(),
        "shm_mb": shm.f_frsize * shm.f_bavail // MB if shm else 0,
        "interface": route_to(environment.master_addr),
    }


def gpus_here() -> str:
    """Return the names of the GPUs that torch sees and the driver's version; nothing without any."""
    if not torch.cuda.is_available():
        return ""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = ""
    if shutil.which(query[0]):
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.partition("\n")[
            0
        ]
    return f"{len(names)} × {names[0]}, driver {driver or 'unknown'}, CUDA {torch.version.cuda}"


def available_memory_mb() -> int:
    """Return how much memory is free or can be freed: of the host, as a container's limit is met only later."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) // 1024


def disk_row(run_dir: Path, *, size_mb: int = 64) -> Row:
    """Write `size_mb` to a file beside what a run would write, and say how fast it came to the disk."""
    folder = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    block = os.urandom(MB)
    began = time.monotonic()
    try:
        with open(probe, "wb") as file:
            for _ in range(size_mb):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = size_mb / (time.monotonic() - began)
    except OSError as error:
        fix = "set output_dir to a folder that rank 0 can write, with room"
        return Row("disk", f"{folder}: {error.strerror}", f"{folder} cannot be written ({error.strerror}): {fix}", True)
    finally:
        probe.unlink(missing_ok=True)
    slow = rate < SLOW_DISK_MB
    advice = f"the disk of {folder} writes {rate:.0f} MB/s: put output_dir on a faster one, or save less often"
    return Row("disk", f"{folder}: {rate:,.0f} MB/s written and synced", advice if slow else "")


# --- all of them together -------------------------------------------------------------------------


def allreduce_seconds(world: World, *, numel: int, times: int) -> float:
    """Return the median time of an all-reduce of `numel` float32. Collective: every rank must call this."""
    tensor, seconds = torch.zeros(numel, device=world.device), []
    for _ in range(times + 2):
        began = time.perf_counter()
        world.sum(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])  # the first ones open connections


def clock_offsets(world: World) -> list[float]:
    """Return by how many seconds each rank's clock is ahead of rank 0's, as sure as a collective is short."""
    world.sum(torch.zeros(1, device=world.device)).item()
    times = world.gather(time.time())
    return [there - times[0] for there in times]


def version_row(ranks: list[dict[str, Any]]) -> Row:
    """Say which versions there are, and whose are others."""
    first = ranks[0]["versions"]
    others = {rank["host"]: rank["versions"] for rank in ranks if rank["versions"] != first}
    advice = "; ".join(
        f"{host} has {', '.join(f'{name} {found[name]}' for name in first if found[name] != first[name])}"
        for host, found in others.items()
    )
    return Row(
        "versions",
        ", ".join(f"{name} {found}" for name, found in first.items()),
        advice and f"{advice}, other than rank 0: install the same on all nodes",
        fatal=bool(advice),
    )


def cores_row(nodes: dict[str, dict[str, Any]], world: World) -> Row:
    """Say how many cores a node has for its ranks."""
    crowded = [f"{name} has {count(n['cores'], 'core')} for {count(n['ranks'], 'rank')}" for name, n in nodes.items()
               if n["ranks"] > n["cores"]]  # fmt: skip
    found = agreed(nodes, lambda node: f"{node['cores']} usable for {count(node['ranks'], 'rank')}")
    advice = f"{', '.join(crowded)}: ranks will wait for each other, use a rank a core at most" if crowded else ""
    return Row("cores", f"{found}, {count(world.num_threads, 'thread')} a rank", advice)


def memory_row(nodes: dict[str, dict[str, Any]]) -> Row:
    """Say how much memory there is; the ranks that ask have theirs already, so what is left is for the data."""
    tight = [name for name, node in nodes.items() if node["memory_mb"] < RANK_MB]
    advice = f"{', '.join(tight)}: under {RANK_MB} MB of memory left, use fewer ranks there" if tight else ""
    return Row("memory", agreed(nodes, lambda node: f"{node['memory_mb'] / 1024:.1f} GB available"), advice)


def group_row(world: World, environment: Environment, nodes: dict[str, dict[str, Any]]) -> Row:
    """Say who is in the process group, and over which interface."""
    where = f"{count(world.world_size, 'rank')} on {count(len(nodes), 'node')}"
    found = f"{where}, {world.backend} on {world.device.type}"
    if len(nodes) == 1:
        return Row("process group", found)
    interfaces = agreed(nodes, lambda node: node["interface"] or "an interface without a name")
    loopback = is_loopback(resolve(environment.master_addr, timeout=10))
    advice = f"the head is {environment.master_addr}, which only ranks on this machine can reach" if loopback else ""
    return Row("process group", f"{found}, over {interfaces} to {environment.master_addr}", advice)


def transfer_rows(world: World, *, latency: float, transfer: float, size_mb: int) -> list[Row]:
    """Say how fast gradients would travel."""
    if world.world_size == 1:
        return []
    rate = size_mb / transfer
    slow = f"all-reduce moves {rate:.0f} MB/s: is {world.backend} on the right interface, and are the cores free?"
    return [
        Row("all-reduce, latency", f"{latency * 1e6:,.0f} µs (4 bytes, median of 100)"),
        Row("all-reduce, bandwidth", f"{rate:,.0f} MB/s ({size_mb} MB in {transfer * 1e3:,.0f} ms)",
            slow if rate < SLOW_LINK_MB else ""),
    ]  # fmt: skip


def clock_row(offsets: list[float], ranks: list[dict[str, Any]]) -> Row:
    """Say how far clocks are apart."""
    worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    skew = abs(offsets[worst])
    advice = f"the clock of {ranks[worst]['host']} is {skew:.1f} s off rank 0's: set the clocks (chrony or ntp)"
    return Row("clocks", f"within {skew:.3f} s", advice if skew > SKEW_SECONDS else "", fatal=skew > CLOCK_SECONDS)


# --- telling --------------------------------------------------------------------------------------


def print_table(rows: list[Row]) -> None:
    """Print what was found."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row("✗" if row.fatal else "!" if row.advice else "✓", row.what, row.found)
    Console(width=max(80, shutil.get_terminal_size((120, 24)).columns)).print(table)


def verdict(rows: list[Row], world: World) -> str:
    """Return the last lines: what to mind, and whether it is ready."""
    minded = [f"mind: {row.advice}" for row in rows if row.advice and not row.fatal]
    fatal = [f"error: {row.advice}" for row in rows if row.fatal]
    return "\n".join([*minded, *(fatal or [f"ready: {count(world.world_size, 'rank')} can train here"])])


def count(number: int, what: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


if __name__ == "__main__":
    main()
