"""Examination of the hosts of a job: versions, cores, memory, disk, network and speed."""

import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_trainer.distributed.environment import (
    installed_versions,
    interface_towards,
    read_environment,
    usable_cores,
)
from ddp_trainer.distributed.world import World
from ddp_trainer.launchers.fitness import UNITS, measure_fitness
from ddp_trainer.launchers.node_check.client import CLOCK_SECONDS
from ddp_trainer.launchers.node_check.server import SLOW
from ddp_trainer.timing import median_seconds

MB = 2**20
RANK_MB = 500
"""The memory of a rank before it loads data: 390 MB were measured with torch's CUDA build."""
SLOW_DISK_MB = 50
SLOW_NETWORK_MB = 100
"""MB/s, at which a checkpoint of ResNet-18 takes 2 s, and its gradients 0.5 s."""
SKEW_SECONDS = 1.0
"""How far clocks may be apart without a warning."""


class Finding(NamedTuple):
    """A line of the table. advice: a problem and its fix; is_error: training cannot start."""

    name: str
    value: str
    advice: str = ""
    is_error: bool = False

    @property
    def mark(self) -> str:
        """A character for the severity."""
        return "✗" if self.is_error else "!" if self.advice else "✓"


def examine(world: World, *, run_dir: Path, size_mb: int) -> list[Finding]:
    """Examine all hosts, the disk of `run_dir` and an all-reduce of `size_mb` MB. Collective."""
    network = network_findings(world, size_mb=size_mb) if world.world_size > 1 else []
    # before the clocks, because all ranks finish it at the same time
    fitness = fitness_findings(world)
    ranks = world.all_gather_object((socket.gethostname(), time.time(), host_findings(world)))
    nodes = {
        host: [Finding(*finding) for finding in findings] for host, _, findings in reversed(ranks)
    }
    size = f"{plural(world.world_size, 'rank')} on {plural(len(nodes), 'node')}"
    findings = [
        *merge_hosts(nodes),
        disk_finding(run_dir) if world.is_main else Finding("disk", "rank 0 measures it"),
        Finding("process group", f"{size}, {world.backend} on {world.device.type}"),
        *network,
        *fitness,
        clock_finding({host: seconds - ranks[0][1] for host, seconds, _ in ranks}),
    ]
    return [Finding(*finding) for finding in world.broadcast_object(findings)]


def host_findings(world: World) -> list[Finding]:
    """Return the findings about this host: versions, GPUs, cores, memory and network interface."""
    versions = ", ".join(" ".join(item) for item in installed_versions().items())
    interface = interface_towards(read_environment().master_addr) or "unknown"
    return [
        Finding("versions", versions),
        gpu_finding(),
        cores_finding(world),
        memory_finding(),
        Finding("interface to rank 0", interface),
    ]


def gpu_finding() -> Finding:
    """Return the finding about number and kind of the GPUs, and the version of CUDA."""
    # not device_count alone, because a driver may be too old
    if not torch.cuda.is_available():
        return Finding("GPU, CUDA", "none")
    gpus = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return Finding("GPU, CUDA", f"{gpus}, CUDA {torch.version.cuda}")


def cores_finding(world: World) -> Finding:
    """Return the finding about the cores of this host, which its ranks share."""
    cores = plural(usable_cores(), "core")
    ranks = plural(world.local_world_size, "rank")
    advice = f"{ranks} share {cores}, which slows them: start at most one rank per core"
    is_crowded = usable_cores() < world.local_world_size
    value = f"{cores} for {ranks} of {plural(world.num_threads, 'thread')}"
    return Finding("cores", value, advice if is_crowded else "")


def memory_finding() -> Finding:
    """Return the finding about the memory of the host; the limit of a container may be lower."""
    meminfo = Path("/proc/meminfo").read_text()
    available_mb = int(meminfo.partition("MemAvailable:")[2].split()[0]) // 1024
    advice = f"less than {RANK_MB} MB of memory is available: start fewer ranks"
    value = f"{available_mb / 1024:.1f} GB available"
    return Finding("memory", value, advice if available_mb < RANK_MB else "")


def merge_hosts(nodes: dict[str, list[Finding]]) -> list[Finding]:
    """Return the findings of all hosts, which are in the same order, as those of one."""
    return [
        merge_finding(dict(zip(nodes, findings, strict=True)))
        for findings in zip(*nodes.values(), strict=True)
    ]


def merge_finding(nodes: dict[str, Finding]) -> Finding:
    """Return one finding for all hosts; unequal values are listed, unequal versions an error."""
    name, value, *_ = next(iter(nodes.values()))
    advice = [f"{host}: {finding.advice}" for host, finding in nodes.items() if finding.advice]
    if all(finding.value == value for finding in nodes.values()):
        return Finding(name, value, "; ".join(advice))
    values = "; ".join(f"{host}: {finding.value}" for host, finding in nodes.items())
    if name == "versions":
        problem = f"versions differ ({values}): install the same on all nodes"
        return Finding(name, values, problem, is_error=True)
    return Finding(name, values, "; ".join(advice))


def disk_finding(run_dir: Path) -> Finding:
    """Write 64 MB to the disk of `run_dir`; return its speed, or why it cannot be written."""
    parents = (run_dir, *run_dir.absolute().parents)
    folder = next(folder for folder in parents if os.path.isdir(folder))
    data = os.urandom(64 * MB)
    began = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "set output_dir to a folder where rank 0 can write"
        advice = f"{folder} cannot be written ({error.strerror}): {fix}"
        return Finding("disk", f"{folder}: {error.strerror}", advice, is_error=True)
    rate = 64 / (time.monotonic() - began)
    fix = "set output_dir to a faster disk, or save less often"
    advice = f"the disk of {folder} writes {rate:.0f} MB/s: {fix}" if rate < SLOW_DISK_MB else ""
    return Finding("disk", f"{folder}: {rate:,.0f} MB/s written and synced", advice)


def network_findings(world: World, *, size_mb: int) -> list[Finding]:
    """Return latency and bandwidth of an all-reduce. Collective: every rank must call this."""
    message = torch.zeros(size_mb * MB // 4, device=world.device)
    latency = median_seconds(lambda: world.all_reduce(message[:1]), world.device, times=100)
    seconds = median_seconds(lambda: world.all_reduce(message), world.device, times=5)
    rate = size_mb / seconds
    fix = f"check that {world.backend} uses the right interface, and that the cores are idle"
    advice = f"the all-reduce reaches only {rate:.0f} MB/s: {fix}" if rate < SLOW_NETWORK_MB else ""
    size = f"{size_mb} MB in {seconds * 1e3:,.0f} ms"
    return [
        Finding("all-reduce, latency", f"{latency * 1e6:,.0f} µs (4 bytes, median of 100)"),
        Finding("all-reduce, bandwidth", f"{rate:,.0f} MB/s ({size})", advice),
    ]


def fitness_findings(world: World) -> list[Finding]:
    """Return computing speed and memory bandwidth of all ranks at the same time. Collective."""
    rates = measure_fitness(world.device, num_threads=world.num_threads)
    ranks = world.all_gather_object((socket.gethostname(), rates))
    findings = []
    for name, unit in UNITS.items():
        speeds = [rates[name] for _, rates in ranks]
        low = min(speeds)
        slowest = speeds.index(low)
        others = speeds[:slowest] + speeds[slowest + 1 :] or speeds
        share = low / statistics.median(others)
        advice = (
            f"rank {slowest} on {ranks[slowest][0]} reaches {100 * share:.0f} % of the median of"
            f" the other ranks in its {name}: check for other programs on that host, and for"
            " overheating"
        )
        spread = f" (rank {slowest}) to {max(speeds):,.1f} {unit}" if len(speeds) > 1 else ""
        value = f"{low:,.1f} {unit}{spread}"
        findings.append(Finding(name, value, advice if share < SLOW else ""))
    return findings


def clock_finding(differences: dict[str, float]) -> Finding:
    """Return the finding about the largest of the clocks' differences from rank 0's, in seconds."""
    host = max(differences, key=lambda host: abs(differences[host]))
    skew = abs(differences[host])
    fix = "synchronize the clocks (chrony or ntp)"
    advice = f"the clock of {host} differs by {skew:.1f} s from that of rank 0: {fix}"
    is_skewed = skew > SKEW_SECONDS
    return Finding(
        "clocks", f"within {skew:.3f} s", advice if is_skewed else "", skew > CLOCK_SECONDS
    )


def plural(number: int, noun: str) -> str:
    """Return the number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
