"""Examine this machine, or all machines of a job, and print whether they can train:

    python -m ddp_trainer doctor                                 # this host torchrun
    --nproc_per_node=2 -m ddp_trainer doctor            # the ranks of a job, on all its nodes
    launch/multinode.sh doctor                                   # the same, on the nodes that
    multinode.sh starts python -m ddp_trainer doctor RUN_DIR                         # the current
    stacks of the ranks that train in RUN_DIR

Accepts the keys of a run (device, backend, output_dir …). Exits with 0 if training can start here,
else with 2 and prints the reason.
"""

import os
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_trainer.commands.command_line import errors_as_exit_codes, run_command
from ddp_trainer.commands.options import wants_help
from ddp_trainer.config.errors import POSITIVE, USER_ERROR, require
from ddp_trainer.config.schema import Config
from ddp_trainer.distributed.environment import (
    installed_versions,
    interface_towards,
    read_environment,
    usable_cores,
)
from ddp_trainer.distributed.process_group import World, process_group
from ddp_trainer.launchers.fitness import UNITS, measure_fitness
from ddp_trainer.launchers.node_check.client import CLOCK_SECONDS
from ddp_trainer.launchers.node_check.server import SLOW
from ddp_trainer.observers.failures.stack_exchange import stacks_of
from ddp_trainer.observers.step_timer import median_seconds

MB = 2**20
RANK_MB = (
    500  # memory of a rank before it loads any data: 390 MB were measured with torch's CUDA build
)
# MB/s, at which a checkpoint of ResNet-18 takes 2 s, its gradients 0.5 s
SLOW_DISK_MB = 50
SLOW_NETWORK_MB = 100
SKEW_SECONDS = 1.0  # how far clocks may be apart without a warning


@dataclass(kw_only=True, slots=True)
class DoctorOptions:
    """The options of the command."""

    run_dir: str | None = None
    """The directory whose disk is measured; null: the run directory of the config."""
    size_mb: int = field(default=25, metadata=POSITIVE)
    """Size of the all-reduce that is measured, in units of 2^20 bytes; DDP sends buckets of 25 for
    large models.
    """


class Finding(NamedTuple):
    """One line of the table. `advice` names a problem and its fix, or is empty; `is_error`:
    training cannot start.
    """

    name: str
    value: str
    advice: str = ""
    is_error: bool = False


def main(words: Sequence[str]) -> None:
    """Examine the machines; exit with 2 for wrong input or if training cannot start, with 1 for any
    other failure.
    """
    # sweep/lr=0.1 is a directory
    if words and not wants_help(words) and not re.match("-|(hydra/)?[^/]+=", words[0]):
        with errors_as_exit_codes():
            require(
                len(words) == 1,
                "doctor takes one run directory, or keys: doctor RUN_DIR, or doctor key=value …",
            )
            print(stacks_of(Path(words[0])), end="")
        return
    run_command(doctor, DoctorOptions, words, description=__doc__)


def doctor(config: Config, run_dir: Path, options: DoctorOptions) -> None:
    """Examine the hosts and print the findings on rank 0; exit with 2 on all ranks if one is an
    error. Collective.
    """
    with process_group(read_environment(), **config.process_group) as world:
        findings = examine(world, run_dir=Path(options.run_dir or run_dir), size_mb=options.size_mb)
    errors = [f"error: {finding.advice}" for finding in findings if finding.is_error]
    if world.is_main:
        for name, value, advice, is_error in findings:
            print(f"{'✗' if is_error else '!' if advice else '✓'}  {name:21}  {value}")
        warnings = [
            f"warning: {finding.advice}"
            for finding in findings
            if finding.advice and not finding.is_error
        ]
        print(
            *warnings,
            *(errors or [f"ready: {plural(world.world_size, 'rank')} can train here"]),
            sep="\n",
        )
    if errors:
        sys.exit(USER_ERROR)


def examine(world: World, *, run_dir: Path, size_mb: int) -> list[Finding]:
    """Examine all hosts, the disk of `run_dir` and an all-reduce of `size_mb` MB; return all
    findings. Collective.
    """
    network = network_findings(world, size_mb=size_mb) if world.world_size > 1 else []
    # before the clocks, because all ranks finish it at the same time
    fitness = fitness_findings(world)
    ranks = world.all_gather_object((socket.gethostname(), time.time(), host_findings(world)))
    nodes = {
        host: [Finding(*finding) for finding in findings] for host, _, findings in reversed(ranks)
    }
    where = f"{plural(len(nodes), 'node')}, {world.backend} on {world.device.type}"
    findings = [
        *(
            merge(dict(zip(nodes, findings, strict=True)))
            for findings in zip(*nodes.values(), strict=True)
        ),
        disk_finding(run_dir) if world.is_main else Finding("disk", "rank 0 measures it"),
        Finding("process group", f"{plural(world.world_size, 'rank')} on {where}"),
        *network,
        *fitness,
        clock_finding({host: seconds - ranks[0][1] for host, seconds, _ in ranks}),
    ]
    return [Finding(*finding) for finding in world.broadcast_object(findings)]


def host_findings(world: World) -> list[Finding]:
    """Return the findings about this host: versions, GPUs, cores, memory, /dev/shm and network
    interface.
    """
    cores = plural(usable_cores(), "core")
    ranks = plural(world.local_world_size, "rank")
    is_crowded = usable_cores() < world.local_world_size
    meminfo = Path(
        "/proc/meminfo"
    ).read_text()  # memory of the host: the limit of a container may be lower
    memory_mb = int(meminfo.partition("MemAvailable:")[2].split()[0]) // 1024
    shm_mb = shutil.disk_usage("/dev/shm").free // MB if os.path.isdir("/dev/shm") else 0
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # a driver may be too old
    driver = Path("/proc/driver/nvidia/version")
    version = re.search(r"\d+\.\d+[.\d]*", driver.read_text() if driver.exists() else "")
    versions = f"driver {version[0] if version else 'unknown'}, CUDA {torch.version.cuda}"
    return [
        Finding("versions", ", ".join(" ".join(item) for item in installed_versions().items())),
        Finding(
            "GPU, driver",
            f"{gpus} × {torch.cuda.get_device_name(0)}, {versions}" if gpus else "none",
        ),
        Finding(
            "cores",
            f"{cores} for {ranks} of {plural(world.num_threads, 'thread')}",
            (
                f"{ranks} share {cores}, which slows them: start at most one rank per core"
                if is_crowded
                else ""
            ),
        ),
        Finding(
            "memory",
            f"{memory_mb / 1024:.1f} GB available",
            (
                f"less than {RANK_MB} MB of memory is available: start fewer ranks"
                if memory_mb < RANK_MB
                else ""
            ),
        ),
        Finding("/dev/shm", f"{shm_mb:,} MB"),
        Finding(
            "interface to rank 0", interface_towards(read_environment().master_addr) or "unknown"
        ),
    ]


def merge(nodes: dict[str, Finding]) -> Finding:
    """Return one finding for all hosts of `nodes`: unequal values are listed by host; unequal
    versions are an error.
    """
    name, value, _, _ = next(iter(nodes.values()))
    advice = "; ".join(
        f"{host}: {finding.advice}" for host, finding in nodes.items() if finding.advice
    )
    if all(finding.value == value for finding in nodes.values()):
        return Finding(name, value, advice)
    value = "; ".join(f"{host}: {finding.value}" for host, finding in nodes.items())
    if name == "versions":
        return Finding(
            name, value, f"versions differ ({value}): install the same on all nodes", is_error=True
        )
    return Finding(name, value, advice)


def disk_finding(run_dir: Path) -> Finding:
    """Write 64 MB to the disk of `run_dir`, and return the finding: its speed in MB/s, or why it
    cannot be written.
    """
    folder = next(
        folder for folder in (run_dir, *run_dir.absolute().parents) if os.path.isdir(folder)
    )
    data = os.urandom(64 * MB)
    began = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        advice = (
            f"{folder} cannot be written ({error.strerror}): set output_dir to a folder where rank"
            " 0 can write"
        )
        return Finding("disk", f"{folder}: {error.strerror}", advice, is_error=True)
    rate = 64 / (time.monotonic() - began)
    advice = (
        f"the disk of {folder} writes {rate:.0f} MB/s: set output_dir to a faster disk, or save"
        " less often"
    )
    return Finding(
        "disk",
        f"{folder}: {rate:,.0f} MB/s written and synced",
        advice if rate < SLOW_DISK_MB else "",
    )


def network_findings(world: World, *, size_mb: int) -> list[Finding]:
    """Measure and return the latency and the bandwidth of an all-reduce. Collective: every rank
    must call this.
    """
    message = torch.zeros(size_mb * MB // 4, device=world.device)
    latency = median_seconds(lambda: world.all_reduce(message[:1]), world.device, times=100)
    seconds = median_seconds(lambda: world.all_reduce(message), world.device, times=5)
    rate = size_mb / seconds
    fix = f"check that {world.backend} uses the right interface, and that the cores are idle"
    advice = f"the all-reduce reaches only {rate:.0f} MB/s: {fix}" if rate < SLOW_NETWORK_MB else ""
    return [
        Finding("all-reduce, latency", f"{latency * 1e6:,.0f} µs (4 bytes, median of 100)"),
        Finding(
            "all-reduce, bandwidth",
            f"{rate:,.0f} MB/s ({size_mb} MB in {seconds * 1e3:,.0f} ms)",
            advice,
        ),
    ]


def fitness_findings(world: World) -> list[Finding]:
    """Measure computing speed and memory bandwidth of all ranks at the same time, and return both.
    Collective.
    """
    ranks = world.all_gather_object(
        (socket.gethostname(), measure_fitness(world.device, num_threads=world.num_threads))
    )
    findings = []
    for name, unit in UNITS.items():
        (low, rank, host), *others = sorted(
            (rates[name], rank, host) for rank, (host, rates) in enumerate(ranks)
        )
        value = f"{low:,.1f} {unit}" + (
            f" (rank {rank}) to {others[-1][0]:,.1f} {unit}" if others else ""
        )
        share = low / statistics.median([rate for rate, *_ in others] or [low])
        advice = (
            f"rank {rank} on {host} reaches {100 * share:.0f} % of the median of the other ranks in"
            f" its {name}"
        )
        fix = "check for other programs on that host, and for overheating"
        findings.append(Finding(name, value, f"{advice}: {fix}" if share < SLOW else ""))
    return findings


def clock_finding(differences: dict[str, float]) -> Finding:
    """Return the finding about the largest of `differences`: by host, seconds its clock is ahead of
    rank 0's clock.
    """
    host, skew = max(
        ((host, abs(seconds)) for host, seconds in differences.items()), key=lambda item: item[1]
    )
    advice = (
        f"the clock of {host} differs by {skew:.1f} s from that of rank 0: synchronize the clocks"
        " (chrony or ntp)"
    )
    return Finding(
        "clocks",
        f"within {skew:.3f} s",
        advice if skew > SKEW_SECONDS else "",
        skew > CLOCK_SECONDS,
    )


def plural(number: int, noun: str) -> str:
    """Return the number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
