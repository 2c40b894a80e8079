"""Examination of the hosts of a job: versions, cores, memory, disk, network and speed."""

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_trainer.config.errors import ConfigError, plural
from ddp_trainer.cores import usable_cores
from ddp_trainer.distributed.environment import (
    installed_versions,
    interface_towards,
    read_environment,
)
from ddp_trainer.distributed.world import World
from ddp_trainer.launchers.fitness import UNITS, measure_fitness
from ddp_trainer.launchers.node_check.server import SLOW
from ddp_trainer.start import check_same
from ddp_trainer.timing import median_seconds

MIB = 2**20
RANK_MIB = 500
"""MiB that a rank needs before it loads data: 390 MiB were measured with torch's CUDA build."""
SLOW_DISK_MIB = 50
SLOW_NETWORK_MIB = 100
"""MiB/s below which there is advice.

At these speeds, writing a checkpoint of ResNet-18 takes 2 s, and all-reducing its gradients 0.5 s.
"""


class Finding(NamedTuple):
    """A line of the output. advice: a problem and its fix; "" if there is no problem."""

    name: str
    value: str
    advice: str = ""


def examine(world: World, *, run_dir: Path, size_mib: int) -> list[Finding]:
    """Examine all hosts, the disk of `run_dir` and an all-reduce of `size_mib` MiB. Collective.

    Returns the findings about all hosts. The finding about the disk is returned on rank 0 only.

    Raises:
        ConfigError: on all ranks, if training cannot start: the versions on the hosts differ, or
        rank 0 cannot write to `run_dir`.
    """
    fix = "install the same versions on all nodes"
    check_same("versions", installed_versions(), world, fix=fix)
    network = network_findings(world, size_mib=size_mib) if world.world_size > 1 else []
    rates = measure_fitness(world.device, num_threads=world.num_threads)
    ranks = world.all_gather_object((socket.gethostname(), host_findings(world), rates))
    nodes = {host: [Finding(*finding) for finding in findings] for host, findings, _ in ranks}
    size = f"{plural(world.world_size, 'rank')} on {plural(len(nodes), 'node')}"
    disk = world.raise_on_any_rank(lambda: [disk_finding(run_dir)] if world.is_main else [])
    return [
        *(
            merge_finding(dict(zip(nodes, findings, strict=True)))
            for findings in zip(*nodes.values(), strict=True)
        ),
        *disk,
        Finding("process group", f"{size}, {world.backend} on {world.device.type}"),
        *network,
        *fitness_findings([(host, speeds) for host, _, speeds in ranks]),
    ]


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
    # not only device_count, which also counts GPUs whose driver is too old
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
    available_mib = int(meminfo.partition("MemAvailable:")[2].split()[0]) // 1024
    advice = f"less than {RANK_MIB} MiB of memory is available: start fewer ranks"
    value = f"{available_mib / 1024:.1f} GiB available"
    return Finding("memory", value, advice if available_mib < RANK_MIB else "")


def merge_finding(nodes: dict[str, Finding]) -> Finding:
    """Return one finding for all hosts. nodes: the finding of each host.

    The value lists the values of all hosts if they differ.
    """
    name, value, _ = next(iter(nodes.values()))
    advice = [f"{host}: {finding.advice}" for host, finding in nodes.items() if finding.advice]
    if len({finding.value for finding in nodes.values()}) > 1:
        value = "; ".join(f"{host}: {finding.value}" for host, finding in nodes.items())
    return Finding(name, value, "; ".join(advice))


def disk_finding(run_dir: Path) -> Finding:
    """Write 64 MiB to the disk of `run_dir`; return the finding about its speed.

    Raises:
        ConfigError: the folder cannot be written.
    """
    parents = (run_dir, *run_dir.absolute().parents)
    folder = next(folder for folder in parents if os.path.lexists(folder))
    data = os.urandom(64 * MIB)
    began = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "set output_dir to a folder where rank 0 can write"
        raise ConfigError(f"{folder} cannot be written ({error.strerror}): {fix}") from error
    rate = 64 / (time.monotonic() - began)
    fix = "set output_dir to a faster disk, or save less often"
    advice = f"the disk of {folder} writes {rate:.0f} MiB/s: {fix}" if rate < SLOW_DISK_MIB else ""
    return Finding("disk", f"{folder}: {rate:,.0f} MiB/s written and synced", advice)


def network_findings(world: World, *, size_mib: int) -> list[Finding]:
    """Return the findings about latency and bandwidth of an all-reduce. Collective."""
    message = torch.zeros(size_mib * MIB // 4, device=world.device)
    latency = median_seconds(lambda: world.all_reduce(message[:1]), world.device, times=100)
    seconds = median_seconds(lambda: world.all_reduce(message), world.device, times=5)
    rate = size_mib / seconds
    fix = f"check that {world.backend} uses the right interface, and that the cores are idle"
    advice = (
        f"the all-reduce reaches only {rate:.0f} MiB/s: {fix}" if rate < SLOW_NETWORK_MIB else ""
    )
    size = f"{size_mib} MiB in {seconds * 1e3:,.0f} ms"
    return [
        Finding("all-reduce, latency", f"{latency * 1e6:,.0f} µs (4 bytes, median of 100)"),
        Finding("all-reduce, bandwidth", f"{rate:,.0f} MiB/s ({size})", advice),
    ]


def fitness_findings(ranks: Sequence[tuple[str, dict[str, float]]]) -> list[Finding]:
    """Return a finding for each kind of speed. ranks: host and speeds of each rank."""
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
