"""Compare the strategies between two hosts, over links of several speeds, beside what the plan predicts.

    sudo .venv/bin/python benchmarks/over_links.py --model resnet18 --batch 64 --links 200mbit,1gbit,unshaped

The hosts are network namespaces of this machine, a rank of one thread each; tc shapes their links. For each link
`ddp_trainer.plan` measures what a rank computes and what a message costs, and predicts; then `ddp_trainer.benchmark`
measures the strategies, rounds interleaved.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from cluster.namespaces import NEEDS, Hosts, can_make_hosts  # noqa: E402  # the tests' hosts

DEADLINE_SECONDS = 1500


def torchrun_on_both(hosts: Hosts, folder: Path, words: list[str]) -> None:
    """Run a module on both hosts under torchrun, to its end."""
    log = folder / "log"
    nodes = [
        hosts.start(
            rank,
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}",
                "--nproc-per-node=1", f"--master-addr={hosts.address(0)}", "--master-port=29400",
                f"--local-addr={hosts.address(rank)}", *words,
            ],
            log, OMP_NUM_THREADS="1",
        )
        for rank in range(2)
    ]  # fmt: skip
    deadline = time.monotonic() + DEADLINE_SECONDS
    codes = [node.wait(max(1, deadline - time.monotonic())) for node in nodes]
    if any(codes):
        sys.exit(f"{words}: exit codes {codes}\n{log.read_text()}")


def measure(link: str, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the benchmark's rows over `link`, and the predicted milliseconds of a step by strategy."""
    rate = None if link == "unshaped" else link
    with tempfile.TemporaryDirectory() as name, Hosts(2, rate=rate) as hosts:
        folder = Path(name)
        overrides = [
            f"model={arguments.model}", "data=fashion_mnist", f"global_batch_size={arguments.batch}", "num_threads=1",
            f"output_dir={folder}", "name=run", "timeout_seconds=600",
        ]  # fmt: skip
        torchrun_on_both(hosts, folder, ["-m", "ddp_trainer.plan", "--ranks=2", *overrides])
        options = [f"--rounds={arguments.rounds}", f"--steps={arguments.steps}", f"--strategies={arguments.strategies}"]
        torchrun_on_both(hosts, folder, ["-m", "ddp_trainer.benchmark", *options, *overrides])
        planned = json.loads((folder / "plan-run" / "plan.json").read_text())["predictions"]
        rows = json.loads((folder / "benchmark-run" / "benchmark.json").read_text())["rows"]
    return rows, {one["strategy"]: 1e3 * one["step"] for one in planned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=64, help="global, over both hosts")
    parser.add_argument("--links", default="200mbit,1gbit,unshaped")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--strategies", default="ddp,allreduce,ring,parameter_server")
    arguments = parser.parse_args()
    if not can_make_hosts():
        sys.exit(NEEDS)
    print(f"{arguments.model}, {arguments.batch // 2} images a rank, {platform.processor() or platform.machine()}, "
          f"torch {torch.__version__}\n")  # fmt: skip
    print("| link | sync | step ms (median) | × ddp (range) | predicted ms | error |\n|---|---|---|---|---|---|")
    for link in arguments.links.split(","):
        rows, planned = measure(link, arguments)
        for row in rows:
            ratio = f"{row['relative']:.2f} ({row['relative_least']:.2f}–{row['relative_most']:.2f})"
            told = planned.get(row["name"])
            prediction = "| – | – |" if told is None else f"| {told:,.0f} | {told / row['step_ms'] - 1:+.0%} |"
            print(f"| {link} | {row['name']} | {row['step_ms']:,.0f} | {ratio} {prediction}", flush=True)


if __name__ == "__main__":
    main()
