"""Measure images per second of 1, 2 and 4 hosts, unshaped and at 1 Gbit/s, and print a Markdown
table.

    python benchmarks/scaling.py --rounds 5    # as root: hosts are network namespaces of this
    machine

A host is one rank of one thread, started by launch/multinode.sh; the global batch is the same for
any number of hosts (strong scaling). A round measures every case once, and each round begins with
another one. All hosts share the cores of this machine, so more hosts than cores cannot be faster.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.namespaces import NEEDS, Hosts, can_make_hosts  # noqa: E402  # the tests' hosts

HOSTS = (1, 2, 4)
LINKS = {"unshaped": None, "1 Gbit/s": "1gbit"}
MODELS = {"lenet": (256, 150), "resnet18": (64, 30)}
"""Global batch, and steps with --share 1."""
DEADLINE_SECONDS = 900


@dataclass(frozen=True)
class Case:
    """One measurement of a round."""

    model: str
    link: str
    hosts: int


def measure(case: Case, *, share: float, words: Sequence[str] = ()) -> float:
    """Return images per second of `case`, over `share` of its steps: the median over the run's log
    windows. words: more settings.
    """
    batch, steps = MODELS[case.model]
    steps = max(10, int(steps * share))
    with tempfile.TemporaryDirectory() as folder, Hosts(case.hosts, rate=LINKS[case.link]) as hosts:
        overrides = (
            f"model={case.model}",
            "data=synthetic",
            "data.num_train=20000",
            "data.num_eval=100",
            "data.channels=1",
            "data.height=28",
            "data.width=28",
            "data.mean=[0.5]",
            "data.std=[0.25]",
            f"global_batch_size={batch}",
            "epochs=100",
            f"max_steps={steps}",
            f"log_every_steps={steps // 5}",
            "num_threads=1",
            f"output_dir={folder}",
            "name=run",
            *words,
        )
        log = Path(folder) / "log"
        nodes = [
            hosts.start(
                rank,
                [str(ROOT / "launch" / "multinode.sh"), *overrides],
                log,
                NNODES=str(case.hosts),
                NODE_RANK=str(rank),
                HEAD=hosts.address(0),
                NPROC="1",
                JOIN_SECONDS="60",
            )
            for rank in range(case.hosts)
        ]
        deadline = time.monotonic() + DEADLINE_SECONDS
        codes = [node.wait(max(1, deadline - time.monotonic())) for node in nodes]
        if any(codes):
            sys.exit(f"{case}: exit codes {codes}\n{log.read_text()}")
        return json.loads((Path(folder) / "run" / "summary.json").read_text())["images_per_second"]


def print_table(rates: dict[Case, list[float]]) -> None:
    """Print the medians, and each as a share of the speed of one host times the cores in use."""
    cores = len(os.sched_getaffinity(0))
    rounds = len(next(iter(rates.values())))
    print(
        f"\n{cores} cores ({platform.processor() or platform.machine()}), torch"
        f" {torch.__version__}, gloo, one thread a host; images/s, median of {rounds} rounds"
        f" (range), and the share of min(hosts, {cores} cores) × one host\n"
    )
    print("| model, global batch | link |" + "".join(f" {n} host{'s' * (n > 1)} |" for n in HOSTS))
    print("|---|---|" + "---|" * len(HOSTS))
    for model, (batch, _) in MODELS.items():
        for link in LINKS:
            row = {n: rates[Case(model, link, n)] for n in HOSTS}
            alone = statistics.median(row[1])
            cells = []
            for n, values in row.items():
                rate = statistics.median(values)
                share = "" if n == 1 else f", {rate / alone / min(n, cores):.0%}"
                cells.append(f" {rate:,.0f} ({min(values):,.0f}–{max(values):,.0f}){share} |")
            print(f"| {model}, {batch} | {link} |" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="share of the steps of each case, for a short trial",
    )
    arguments = parser.parse_args()
    if not can_make_hosts():
        sys.exit(NEEDS)
    cases = [Case(model, link, n) for model in MODELS for link in LINKS for n in HOSTS]
    rates: dict[Case, list[float]] = {case: [] for case in cases}
    for round_ in range(arguments.rounds):
        first = round_ % len(cases)
        for case in cases[first:] + cases[:first]:
            rates[case].append(measure(case, share=arguments.share))
            print(
                f"round {round_ + 1}: {case.model}, {case.link}, {case.hosts} hosts:"
                f" {rates[case][-1]:,.1f} img/s",
                file=sys.stderr,
                flush=True,
            )
    print_table(rates)


if __name__ == "__main__":
    main()
