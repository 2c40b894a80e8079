"""Measure the strategies between hosts, over links of several speeds, and compare with the
prediction of plan.

    sudo .venv/bin/python benchmarks/over_links.py --model resnet18 --batch 64 --links
    200mbit,1gbit,unshaped

The hosts are network namespaces of this machine, with one rank of one thread each; tc limits the
speed of their links. For each link the command plan measures computing and messages and predicts
the step time; then the command benchmark measures it.
"""

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


def torchrun_on_all(hosts: Hosts, ranks: int, folder: Path, words: list[str]) -> None:
    """Run a command under torchrun, with one rank on each host."""
    log = folder / "log"
    nodes = [
        hosts.start(
            rank,
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nnodes={ranks}",
                f"--node-rank={rank}",
                "--nproc-per-node=1",
                f"--master-addr={hosts.address(0)}",
                "--master-port=29400",
                f"--local-addr={hosts.address(rank)}",
                *words,
            ],
            log,
            OMP_NUM_THREADS="1",
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + DEADLINE_SECONDS
    codes = [node.wait(max(1, deadline - time.monotonic())) for node in nodes]
    if any(codes):
        sys.exit(f"{words}: exit codes {codes}\n{log.read_text()}")


def measure(
    link: str, arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the benchmark's rows over `link`, and the predicted milliseconds of a step by
    strategy.
    """
    rate = None if link == "unshaped" else link
    with tempfile.TemporaryDirectory() as name, Hosts(arguments.ranks, rate=rate) as hosts:
        folder = Path(name)
        overrides = [
            f"model={arguments.model}",
            "data=fashion_mnist",
            f"global_batch_size={arguments.batch}",
            "num_threads=1",
            f"output_dir={folder}",
            "name=run",
            "timeout_seconds=600",
        ]
        words = ["-m", "ddp_trainer", "plan", f"ranks={arguments.ranks}", *overrides]
        torchrun_on_all(hosts, arguments.ranks, folder, words)
        options = [
            f"rounds={arguments.rounds}",
            f"steps={arguments.steps}",
            f"strategies={arguments.strategies}",
        ]
        words = ["-m", "ddp_trainer", "benchmark", *options, *overrides]
        torchrun_on_all(hosts, arguments.ranks, folder, words)
        planned = json.loads((folder / "plan-run" / "plan.json").read_text())["predictions"]
        rows = json.loads((folder / "benchmark-run" / "benchmark.json").read_text())["rows"]
    return rows, {prediction["strategy"]: 1e3 * prediction["step"] for prediction in planned}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time per image of each strategy, relative to ddp: a panel for each link."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["ranks"], row["link"]) for row in rows))
    names = list(dict.fromkeys(row["name"] for row in reversed(rows)))
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        own = {row["name"]: row for row in rows if (row["ranks"], row["link"]) == panel}
        values = [own[name]["relative"] if name in own else 0 for name in names]
        ranges = [
            [value - own[name]["relative_min"] if name in own else 0 for name, value in pairs]
            if is_low
            else [own[name]["relative_max"] - value if name in own else 0 for name, value in pairs]
            for is_low in (True, False)
            for pairs in [list(zip(names, values, strict=True))]
        ]
        bars = axes.barh(names, values, xerr=ranges, color="#4477aa", capsize=2)
        axes.bar_label(bars, fmt=lambda value: f"{value:.2f}" if value else "–", padding=4)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(f"{panel[0]} ranks, {panel[1]}", fontsize=10)
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("time per image ÷ that of ddp (median and range of the rounds)", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--ranks", type=int, default=2, help="one on each host")
    parser.add_argument("--batch", type=int, default=64, help="global, over all hosts")
    parser.add_argument("--links", default="200mbit,1gbit,unshaped")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--strategies", default="ddp,allreduce,ring,parameter_server")
    parser.add_argument("--results", type=Path, help="a file to which the rows are added, as JSON")
    parser.add_argument("--draw", type=Path, help="draw --results as this PNG; measure nothing")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(list(map(json.loads, arguments.results.read_text().splitlines())), arguments.draw)
        return
    if not can_make_hosts():
        sys.exit(NEEDS)
    print(
        f"{arguments.model}, {arguments.ranks} hosts, {arguments.batch // arguments.ranks} images"
        " per rank,"
        f" {platform.processor() or platform.machine()}, torch {torch.__version__}\n"
    )
    print(
        "| link | sync | step ms (median) | × ddp (range) | predicted ms | error"
        " |\n|---|---|---|---|---|---|"
    )
    for link in arguments.links.split(","):
        rows, planned = measure(link, arguments)
        for row in rows:
            ratio = f"{row['relative']:.2f} ({row['relative_min']:.2f}–{row['relative_max']:.2f})"
            predicted = planned.get(row["name"])
            cells = (
                "| – | – |"
                if predicted is None
                else f"| {predicted:,.0f} | {predicted / row['step_ms'] - 1:+.0%} |"
            )
            print(f"| {link} | {row['name']} | {row['step_ms']:,.0f} | {ratio} {cells}", flush=True)
            if arguments.results:
                place = {"ranks": arguments.ranks, "link": link, "predicted_ms": predicted}
                with arguments.results.open("a") as file:
                    file.write(json.dumps(place | row) + "\n")


if __name__ == "__main__":
    main()
