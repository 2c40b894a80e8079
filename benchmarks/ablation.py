"""Measure what each optimization of the training step gains: the same job with one of them undone,
interleaved.

    python benchmarks/ablation.py --model lenet --rounds 3

Prints a Markdown table with medians over rounds: images per second, and their ratio to the defaults
in the same round. The model, the data, the augmentation and the global batch are those of
compare.py. The job runs on the CPU, on two ranks of one thread, and takes 400 steps (LeNet) or 8
(ResNet-18).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from compare import Job, cpu_model, overrides_of, torchrun

PROGRAM = """
{patch}

from ddp_trainer.__main__ import main

main()
"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One optimization undone: by config keys, or by a line of Python before the launch."""

    name: str
    overrides: tuple[str, ...] = ()
    patch: str = ""


CHOICES = (
    Choice(name="defaults"),
    Choice(name="fp32 instead of bf16", overrides=("precision=fp32",)),
    Choice(name="NCHW instead of channels_last", overrides=("channels_last=false",)),
    Choice(
        name="freed memory returned to the system",
        patch="import ddp_trainer.start as s; s.keep_freed_memory = lambda: None",
    ),
    Choice(
        name="foreach instead of fused SGD",
        patch=(
            "from functools import partial; import ddp_trainer.optim.optimizers as o; from"
            " torch.optim import SGD\ndef plain(*a, fused, **k): return SGD(*a, foreach=True,"
            " **k)\no.SGD = plain"
        ),
    ),
    Choice(
        name="gradients copied into buckets",
        patch=(
            "import ddp_trainer.sync.ddp as d\n"
            "wrap = d.DistributedDataParallel\n"
            "def copying(*a, gradient_as_bucket_view, **k): return wrap(*a, **k)\n"
            "d.DistributedDataParallel = copying"
        ),
    ),
    Choice(name="buckets of 25 MiB instead of auto", overrides=("sync.bucket_cap_mb=25",)),
    Choice(name="no communication overlap (one flat all-reduce)", overrides=("sync=allreduce",)),
    Choice(
        name="no step timer",
        patch=(
            "import ddp_trainer.observers.step_times as t\n"
            "def count(self, phase):\n"
            "    self.steps += phase is t.Phase.between_steps and self.last is t.Phase.data\n"
            "    self.last = phase\n"
            "t.StepTimer.last = None\n"
            "t.StepTimer.enter = count\n"
            "t.StepTimer._gradients_ready = lambda self, parameter: None\n"
            "t.StepTimer.own_times = lambda self: [[0.0] * 2 * len(t.OWN_WORK)]\n"
            "close = t.StepTimer.close_window\n"
            "def close_window(self, images):\n"
            "    self.begins.append((t.Phase.control_point, self._now()))\n"
            "    return close(self, images)\n"
            "t.StepTimer.close_window = close_window"
        ),
    ),
    Choice(name="compile=true", overrides=("compile=true",)),
)


def rate(job: Job, choice: Choice) -> float:
    """Return the images per second of one run."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM.format(patch=choice.patch))
        torchrun(
            job,
            str(program),
            *overrides_of(job, folder),
            *choice.overrides,
            alike=False,
        )
        return json.loads((Path(folder) / "bench" / "summary.json").read_text())[
            "images_per_second"
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("lenet", "resnet18"), default="lenet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        metavar="WORDS",
        help="measure the defaults and the choices whose name contains WORDS",
    )
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    options = parser.parse_args()
    steps, window = (400, 20) if options.model == "lenet" else (8, 1)
    job = Job(
        model=options.model,
        ranks=2,
        global_batch_size=256,
        data=options.data,
        steps=steps,
        window=window,
        precision="bf16",
        device="cpu",
    )
    chosen = [
        choice
        for choice in CHOICES
        if not options.only or choice is CHOICES[0] or options.only in choice.name
    ]
    rates: dict[str, list[float]] = {choice.name: [] for choice in chosen}
    for round_ in range(options.rounds):
        first = round_ % len(chosen)
        for choice in chosen[first:] + chosen[:first]:
            rates[choice.name].append(rate(job, choice))
            print(
                f"{time.strftime('%H:%M:%S')} {choice.name}: {rates[choice.name][-1]:,.0f}",
                file=sys.stderr,
            )
    print(f"{job.model}, 2 ranks of one thread, global batch 256, {cpu_model()}\n")
    print("| | images/s | × the defaults (range of rounds) |\n|---|--:|--:|")
    base = rates[CHOICES[0].name]
    for name, found in rates.items():
        ratios = [one / other for one, other in zip(found, base, strict=True)]
        print(
            f"| {name} | {statistics.median(found):,.0f} | {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}–{max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    main()
