"""Measure training steps on a GPU, and how much of their time the GPU waits for the host.

    python benchmarks/gpu_steps.py --data=folder --results=folder

Each job trains in this process, without evaluation, log and checkpoints. The idle share is that of
a profile of 20 steps: the time in which no kernel runs, divided by the time of the steps.
"""

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from ddp_trainer.config.composition import config_dir, register_configs, to_config
from ddp_trainer.distributed.environment import read_environment
from ddp_trainer.distributed.process_group import process_group
from ddp_trainer.start import set_up
from ddp_trainer.tools.step_benchmark import StepRun

SMALL = ("data=fashion_mnist", "data.augment.random_crop_padding=2")
LARGE = (
    "model=resnet18",
    "data=synthetic",
    "data.num_train=8192",
    "data.num_eval=8",
    "data.height=224",
    "data.width=224",
    "data.num_classes=100",
)
JOBS = {
    **{
        f"{model} {size} {name}": (*SMALL, f"model={model}", f"global_batch_size={size}", *words)
        for model in ("lenet", "resnet18")
        for size in (256, 1024)
        for name, words in {
            "eager": ("cuda_graphs=false",),
            "graph": (),
            "graph compiled": ("compile=true",),
        }.items()
    },
    "lenet 256 graph NCHW": (*SMALL, "model=lenet", "channels_last=false"),
    "lenet 256 graph NCHW compiled": (
        *SMALL,
        "model=lenet",
        "channels_last=false",
        "compile=true",
    ),
    "resnet18 256 graph NCHW": (*SMALL, "model=resnet18", "channels_last=false"),
    "resnet18 256 graph fp32": (*SMALL, "model=resnet18", "precision=fp32"),
    "resnet18 256 graph fp16": (*SMALL, "model=resnet18", "precision=fp16"),
    **{
        f"224 {size} {name}": (*LARGE, f"global_batch_size={size}", *words)
        for size in (256, 512)
        for name, words in {"graph": (), "graph compiled": ("compile=true",)}.items()
    },
}


def measure(
    words: tuple[str, ...], stack: ExitStack, *, seconds: float
) -> tuple[dict[str, Any], profile]:
    """Return images per second, step time and idle share; and the profile."""
    torch.compiler.reset()
    config = to_config(hydra.compose("config", list(words)))
    setup = set_up(config, read_environment(), stack)
    run = StepRun(setup, setup.build_loaders())
    began = time.perf_counter()
    run.take_steps(8)
    torch.cuda.synchronize()
    warmup = time.perf_counter() - began
    began = time.perf_counter()
    run.take_steps(30)
    torch.cuda.synchronize()
    step = (time.perf_counter() - began) / 30
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        steps = max(20, int(seconds / 3 / step))
        run.take_steps(steps)
        torch.cuda.synchronize()
        rates.append(steps * config.global_batch_size / (time.perf_counter() - began))
    # With record_shapes and stacks off, the profiler costs the host little.
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run.take_steps(25)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    spans = spans[len(spans) // 5 :]  # without the host's work at the start of an epoch
    return {
        "images_per_second": sorted(rates)[1],
        "rates": rates,
        "step_ms": 1e3 * config.global_batch_size / sorted(rates)[1],
        "warmup_seconds": warmup,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        **idle_share(spans),
    }, trace


def idle_share(spans: list[tuple[float, float]]) -> dict[str, float]:
    """Return the share of the time from the first to the last kernel in which none runs.

    launch_gaps: the same without the gaps of at most 2 µs, which kernels of one graph have too.
    """
    if not spans:
        return {"idle_share": float("nan"), "launch_gaps": float("nan"), "kernels_per_step": 0}
    busy = 0.0
    gaps = 0.0
    end = spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        gaps += start - end if start - end > 2 else 0.0
        end = max(end, stop)
    total = end - spans[0][0]
    shares = {"idle_share": 1 - busy / total, "launch_gaps": gaps / total}
    return {**shares, "kernels_per_step": len(spans) / 20}


def kernels(trace: profile) -> str:
    """Return the time of each kernel in a step, in microseconds, the longest first."""
    spent: dict[str, list[float]] = {}
    for event in trace.events() or ():
        if event.device_type == DeviceType.CUDA:
            spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = sorted(spent.items(), key=lambda row: -sum(row[1]))
    return "".join(
        f"{sum(times) / 25:9.1f} {len(times) / 25:6.1f} × {name[:150]}\n" for name, times in rows
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a measurement")
    parser.add_argument("--only", nargs="*", help="names of jobs; default: all")
    parser.add_argument("--trace", default="lenet 256 graph", help="the job whose profile is kept")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.results.mkdir(parents=True, exist_ok=True)
    register_configs()
    results = {}
    with ExitStack() as stack:
        hydra_config = hydra.initialize_config_dir(str(config_dir()), version_base="1.3")
        stack.enter_context(hydra_config)
        config = to_config(hydra.compose("config", ["device=cuda"]))
        stack.enter_context(process_group(read_environment(), **config.process_group))
        for name, words in JOBS.items():
            if options.only and name not in options.only:
                continue
            root = (f"data.root={options.data.resolve()}",) if words[0] == SMALL[0] else ()
            try:
                results[name], trace = measure(
                    (*words, *root, "device=cuda"), stack, seconds=options.seconds
                )
            except Exception as error:  # the other jobs are measured all the same
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            if name == options.trace:
                trace.export_chrome_trace(str(options.results / "trace.json"))
            (options.results / f"kernels {name}.txt".replace(" ", "-")).write_text(kernels(trace))
            found = results[name]
            print(
                f"{name}: {found['images_per_second']:,.0f} images/s, {found['step_ms']:.3f} ms,"
                f" idle {found['idle_share']:.1%} (gaps {found['launch_gaps']:.1%}),"
                f" {found['kernels_per_step']:.0f} kernels,"
                f" warm-up {found['warmup_seconds']:.1f} s, {found['peak_gib']:.1f} GiB",
                flush=True,
            )
            torch.cuda.reset_peak_memory_stats()
    results["device"] = torch.cuda.get_device_name()
    results["torch"] = torch.__version__
    (options.results / "gpu_steps.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
