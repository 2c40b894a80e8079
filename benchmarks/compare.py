"""Run ddp_trainer and other trainers on the same job, interleaved, and print how fast each of them
trains.

    python benchmarks/compare.py --model lenet

Every trainer trains the same model on Fashion-MNIST with the same augmentation and global batch, on
`--ranks` ranks of one thread under torchrun. A round runs each of them once and begins with another
one, so that a slow minute of the machine slows all of them. The rounds give two comparisons. As a
user would run it: the defaults of each trainer. With the same settings: `--precision`, no compile,
and malloc set to keep freed memory. Without that setting glibc maps the activations of a LeNet step
anew or not, depending on what a process has freed before, which changes the speed of plain DDP by a
tenth.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SCRIPTS = {
    "plain DDP": "plain_ddp.py",
    "Lightning": "lightning_ddp.py",
    "Accelerate": "accelerate_ddp.py",
}
PEERS = {
    name: script
    for name, script in SCRIPTS.items()
    if find_spec(name.lower()) or name == "plain DDP"
}
DEFAULTS = "ddp_trainer"
FAST = "ddp_trainer, fast recipe"
ONE_RANK = "ddp_trainer, one rank"
ALIKE = "ddp_trainer, alike"
PLAIN_ALIKE = "plain DDP, alike"
BARE = "bare loop, alike"
FAST_RECIPES = {"lenet": "fashion_mnist_lenet_fast"}
SAME_SETTINGS = (ALIKE, PLAIN_ALIKE, BARE)
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
DEADLINE_SECONDS = 1200


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of all trainers."""

    model: str
    ranks: int
    global_batch_size: int
    steps: int
    window: int
    precision: str
    """Of the comparison with the same settings, and of all peers."""
    device: str
    data: Path

    @property
    def as_a_user(self) -> tuple[str, ...]:
        """The defaults of all trainers, and ddp_trainer with its fast recipe, if the model has one,
        and on one rank.
        """
        fast = (FAST,) if self.model in FAST_RECIPES else ()
        alone = (ONE_RANK,) if self.ranks > 1 else ()
        return (DEFAULTS, *fast, *PEERS, *alone)


@dataclass(kw_only=True)
class Result:
    """The measurements of one trainer, one value per round."""

    images_per_second: list[float] = field(default_factory=list)
    first_step_seconds: list[float] = field(default_factory=list)
    foreign_cores: list[float] = field(default_factory=list)
    """Cores that other processes kept busy meanwhile; above 0.1 or so a round says little."""
    workers: int | None = None
    version: str = ""


def torchrun(job: Job, *command: str, alike: bool) -> str:
    """Run `command` on the ranks of the job, one thread each, and return its output."""
    threads = {"OMP_NUM_THREADS": "1"} if job.device == "cpu" else {}
    environment = os.environ | threads | (KEEP_FREED_MEMORY if alike else {})
    launcher = (
        "-m",
        "torch.distributed.run",
        "--master-addr=127.0.0.1",
        f"--nproc_per_node={job.ranks}",
    )
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        cwd=HERE.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    if done.returncode != 0:
        print(f"exit code {done.returncode}: {' '.join(command)}\n{done.stdout}", file=sys.stderr)
    return done.stdout


def run_peer(job: Job, script: str, *, workers: int, alike: bool = False) -> dict[str, Any]:
    """Run one of the scripts in peers/ and return its report."""
    options = {
        "data": job.data,
        "model": job.model,
        "steps": job.steps,
        "window": job.window,
        "workers": workers,
        "batch-size": job.global_batch_size // job.ranks,
        "precision": job.precision,
        "device": job.device,
        "launched": time.time(),
    }
    words = (f"--{key}={value}" for key, value in options.items())
    output = torchrun(job, str(HERE / "peers" / script), *words, alike=alike)
    report = next(
        json.loads(line) for line in output.splitlines() if line.startswith('{"images_per_second"')
    )
    assert report["world_size"] == job.ranks, report
    assert job.device != "cpu" or report["num_threads"] == 1, report
    return report


def overrides_of(job: Job, folder: str) -> list[str]:
    """Return the overrides with which ddp_trainer trains `job`, in the run `folder`/bench."""
    return [
        f"model={job.model}",
        "data=fashion_mnist",
        f"data.root={job.data}",
        f"global_batch_size={job.global_batch_size}",
        f"max_steps={job.steps}",
        "epochs=100",
        f"log_every_steps={job.window}",
        "data.augment.random_crop_padding=2",
        f"output_dir={folder}",
        "name=bench",
        f"device={job.device}",
        "num_threads=1",
    ]


def run_ours(job: Job, *overrides: str, alike: bool = False) -> dict[str, Any]:
    """Run ddp_trainer and return a report like those of peers, from its run directory."""
    with tempfile.TemporaryDirectory() as folder:
        launched = time.time()
        torchrun(
            job,
            "-m",
            "ddp_trainer",
            *overrides_of(job, folder),
            *overrides,
            alike=alike,
        )
        run_dir = Path(folder) / "bench"
        summary = json.loads((run_dir / "summary.json").read_text())
        records = [
            json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        ]
    first = next(record for record in records if "time/step_ms" in record)
    # From the end of the first step to the first record, as if all steps of this window had taken
    # equally long: if the first step takes longer than the others, "first_step_seconds" is too
    # small by almost the difference.
    window_seconds = first["time/step_ms"] * (job.window - 1) / 1e3
    return {
        "images_per_second": summary["images_per_second"],
        "first_step_seconds": first["time"] - window_seconds - launched,
        "version": f"ddp_trainer {version('ddp_trainer')}",
    }


def best_workers(job: Job, script: str) -> int:
    """Return the number of loader workers, of 0, 1 and 2, with which a peer is fastest."""
    rates = {n: run_peer(job, script, workers=n)["images_per_second"] for n in (0, 1, 2)}
    print(
        f"  {script}: " + ", ".join(f"{n} workers {rate:,.0f} img/s" for n, rate in rates.items()),
        flush=True,
    )
    return max(rates, key=rates.__getitem__)


def run_rounds(job: Job, *, rounds: int, workers: int | None) -> dict[str, Result]:
    """Run every trainer `rounds` times, interleaved."""
    results = {name: Result() for name in (*job.as_a_user, *SAME_SETTINGS)}
    for name, script in PEERS.items():
        results[name].workers = best_workers(job, script) if workers is None else workers
    results[PLAIN_ALIKE].workers = results["plain DDP"].workers
    names = list(results)
    for round_ in range(rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            began = time.perf_counter()
            foreign = foreign_seconds()
            report = run_trainer(job, name, workers=results[name].workers or 0)
            foreign_cores = max(0.0, (foreign_seconds() - foreign) / (time.perf_counter() - began))
            results[name].foreign_cores.append(foreign_cores)
            results[name].images_per_second.append(report["images_per_second"])
            results[name].first_step_seconds.append(report["first_step_seconds"])
            results[name].version = report["version"]
            noise = (
                f" (other processes kept {foreign_cores:.1f} cores busy)"
                if foreign_cores > 0.1
                else ""
            )
            print(
                f"  round {round_ + 1}: {name}: {report['images_per_second']:,.0f} img/s{noise}",
                flush=True,
            )
    return results


def foreign_seconds() -> float:
    """Return the CPU seconds that processes other than this one's children have used since boot."""
    # user, nice, system
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:4]]
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(ticks) / os.sysconf("SC_CLK_TCK") - ours.ru_utime - ours.ru_stime


def run_trainer(job: Job, name: str, *, workers: int) -> dict[str, Any]:
    """Run one trainer once."""
    if name == DEFAULTS:
        return run_ours(job)
    if name == FAST:
        return run_ours(job, f"experiment={FAST_RECIPES[job.model]}")
    if name == ONE_RANK:
        return run_ours(replace(job, ranks=1, global_batch_size=job.global_batch_size // job.ranks))
    if name == ALIKE:
        return run_ours(job, f"precision={job.precision}", "compile=false", alike=True)
    if name == BARE:
        return run_peer(job, "bare_loop.py", workers=0, alike=True)
    if name == PLAIN_ALIKE:
        return run_peer(job, PEERS["plain DDP"], workers=workers, alike=True)
    return run_peer(job, PEERS[name], workers=workers)


def ratio(result: Result, base: Result) -> tuple[float, float, float]:
    """Return the mean of the middle half of the round-by-round ratios, the lowest and the highest.

    One bad round changes it as little as it changes the median. It varies less between runs than
    the median, because it uses half of the rounds instead of one or two.
    """
    ratios = sorted(
        a / b for a, b in zip(result.images_per_second, base.images_per_second, strict=True)
    )
    quarter = round(len(ratios) / 4)
    return statistics.fmean(ratios[quarter : len(ratios) - quarter]), ratios[0], ratios[-1]


def best_peer(results: dict[str, Result]) -> str:
    """Return the name of the peer with the highest median."""
    return max(PEERS, key=lambda name: statistics.median(results[name].images_per_second))


def table(results: dict[str, Result], names: tuple[str, ...], *, base: str) -> str:
    """Return a comparison of `names` as a Markdown table, ratios to `base`."""
    lines = [
        (
            f"| | images/s, median (min–max) | × {base}, middle of rounds (min–max) | launch to"
            " first step, s | workers |"
        ),
        "|---|--:|--:|--:|--:|",
    ]
    for name in names:
        result = results[name]
        rates = result.images_per_second
        middle, low, high = ratio(result, results[base])
        lines.append(
            f"| {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f}) |"
            f" {middle:.2f} ({low:.2f}–{high:.2f}) |"
            f" {statistics.median(result.first_step_seconds):.1f} |"
            f" {'–' if result.workers is None else result.workers} |"
        )
    return "\n".join(lines)


def cpu_model() -> str:
    """Return the processor's name and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    bf16 = ", multiplies bf16" if torch.cpu._is_avx512_bf16_supported() else ""
    return (
        f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores{bf16}"
    )


def draw(results: dict[str, Result], *, title: str, path: Path) -> None:
    """Draw medians as bars and the range as whiskers, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("no picture: matplotlib is not installed, pip install 'ddp_trainer[bench]'")
        return
    names = list(reversed(results))
    medians = [statistics.median(results[name].images_per_second) for name in names]
    spread = [
        [m - min(results[n].images_per_second) for n, m in zip(names, medians, strict=True)],
        [max(results[n].images_per_second) - m for n, m in zip(names, medians, strict=True)],
    ]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#c2410c" if name.startswith("ddp_trainer") else "#94a3b8" for name in names]
    bars = axes.barh(names, medians, xerr=spread, color=colours, capsize=3)
    axes.bar_label(bars, fmt=lambda value: f"{value:,.0f}", padding=6)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("images per second, median of rounds (whiskers: min and max)")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def parse() -> tuple[Job, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("lenet", "resnet18"), default="lenet")
    parser.add_argument("--rounds", type=int, help="default: 12 for lenet, 3 for resnet18")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument(
        "--steps", type=int, help="default: 100 for lenet, 8 for resnet18, 400 on a GPU"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--workers", type=int, help="of the peers' loaders; default: each peer's best of 0, 1 and 2"
    )
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    steps, window, rounds = (100, 20, 12) if options.model == "lenet" else (8, 1, 3)
    options.rounds = options.rounds or rounds
    if options.device == "cuda":
        steps = 400
        window = 50
    job = Job(
        model=options.model,
        ranks=options.ranks,
        global_batch_size=options.global_batch_size,
        data=options.data,
        steps=options.steps or steps,
        window=window,
        precision=options.precision,
        device=options.device,
    )
    return job, options


def main() -> None:
    job, options = parse()
    processor = cpu_model()
    load = os.getloadavg()[0]
    for name in SCRIPTS.keys() - PEERS:
        print(f"{name} is left out: install it by pip install 'ddp_trainer[bench]'")
    threads = " of one thread" if job.device == "cpu" else ""
    print(
        f"{job.model}, global batch {job.global_batch_size}, {job.ranks} ranks{threads} on"
        f" {job.device}, {job.precision} (with its defaults, ddp_trainer chooses the precision"
        " itself)"
    )
    print(f"{processor}; load before: {load:.2f}", flush=True)
    results = run_rounds(job, rounds=options.rounds, workers=options.workers)
    versions = sorted({result.version for result in results.values()})
    print(f"\nAs a user would run it\n\n{table(results, job.as_a_user, base=best_peer(results))}")
    print(f"\nSame settings, {job.precision}\n\n{table(results, SAME_SETTINGS, base=PLAIN_ALIKE)}")
    if ONE_RANK in results:
        middle, low, high = (
            rate / job.ranks for rate in ratio(results[DEFAULTS], results[ONE_RANK])
        )
        print(
            f"\n{job.ranks} ranks over {job.ranks} times one: {middle:.3f} ({low:.3f}–{high:.3f})"
        )
    print(f"\n{', '.join(versions)}, Python {platform.python_version()}")
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{job.model}-{job.precision}.json"
    record = {
        "job": {key: value for key, value in asdict(job).items() if key != "data"},
        "processor": processor,
        "load_before": load,
        "python": platform.python_version(),
        "best_peer": best_peer(results),
        "results": {name: asdict(result) for name, result in results.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    title = f"{job.model}, Fashion-MNIST, {job.ranks} ranks, {processor}"
    draw(results, title=title, path=path.with_suffix(".png"))


if __name__ == "__main__":
    main()
