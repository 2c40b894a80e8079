"""Measure what observers and the check for silent corruption cost: LeNet on 28×28 images, 2 ranks.

    python benchmarks/health_cost.py --rounds 60

In one run, 100 steps (or --segment) without events, 100 with all observers, and 100 with observers
and one check follow each other, in turn. The difference of their times shows all that either costs,
with the noise of the machine; the time inside of their functions, over that of the steps, shows
most of it without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

KINDS = ("no observers", "observers", "observers and check")
SEGMENT = 100


def timed_in(state: dict[str, float], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, whose seconds are added to ``state["inside"]``."""

    def call(*values: Any) -> Any:
        began = time.perf_counter()
        result = function(*values)
        state["inside"] += time.perf_counter() - began
        return result

    return call


def check_of(step: Any) -> Any:
    """Return the gradient check of a training step, which is added if it has none."""
    from ddp_trainer.observers.gradient_check import GradientCheck

    if not step.hooks:
        step.hooks.append(GradientCheck(step, every_steps=10**9, deterministic=False))
    return step.hooks[0]


def install(folder: Path, segment: int) -> None:
    """Switch observers every `segment` steps, and write the seconds of each segment; a plug-in."""
    from torch import Tensor

    from ddp_trainer.observers.gradient_check import GradientCheck
    from ddp_trainer.training.run import Events, TrainingRun
    from ddp_trainer.training.step import TrainStep

    emit = Events.emit
    rank_values = TrainingRun.rank_values
    take_step = TrainStep.__call__
    state = {"kind": 0, "wall": 0.0, "cpu": 0.0, "inside": 0.0}
    output = (folder / f"{os.environ['RANK']}.jsonl").open("w", buffering=1)

    timed = partial(timed_in, state)

    def switched_emit(self: Events, method: str, *arguments: Any) -> dict[str, Any]:
        if state["kind"] or method not in ("on_phase", "on_step", "on_log"):
            return timed(emit)(self, method, *arguments)
        return {}

    def switched_values(self: TrainingRun) -> list[float]:
        self._lengths = {}
        return timed(rank_values)(self) if state["kind"] else []

    def switched_step(self: TrainStep, *batch: Tensor) -> Tensor:
        if self.count % segment == 0:
            wall = time.perf_counter()
            cpu = time.process_time()
            numbers = [state["kind"], wall - state["wall"], cpu - state["cpu"], state["inside"]]
            output.write(json.dumps(numbers) + "\n")
            kind = self.count // segment % 3
            # One check, in the middle of a segment.
            check_of(self).every_steps = segment // 2 if kind == 2 else 10**9
            state.update(kind=kind, wall=time.perf_counter(), cpu=time.process_time(), inside=0.0)
        if self.count % segment == segment - 1:
            check_of(self).every_steps = 10**9
        return take_step(self, *batch)

    GradientCheck.before_forward = timed(GradientCheck.before_forward)
    GradientCheck.before_optimizer = timed(GradientCheck.before_optimizer)
    Events.emit = switched_emit
    TrainingRun.rank_values = switched_values
    TrainStep.__call__ = switched_step  # type: ignore[method-assign]


def main() -> None:
    """Train, and print the median cost of each kind over the one before it in the same round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--segment", type=int, default=SEGMENT, help="steps of a segment [100]")
    parser.add_argument("--model", default="lenet")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        plugin = Path(name) / "switching.py"
        plugin.write_text(
            f"from pathlib import Path\nfrom health_cost import install\ninstall(Path({name!r}),"
            f" {options.segment})\n"
        )
        paths = os.pathsep.join(
            [name, str(Path(__file__).parent), str(Path(__file__).parent.parent)]
        )
        words = [
            f"model={options.model}",
            "data=synthetic",
            "data.height=28",
            "data.width=28",
            "data.channels=1",
            "data.mean=[0.5]",
            "data.std=[0.25]",
            f"data.num_train={options.batch * 1000}",
            "data.num_eval=200",
            f"output_dir={name}",
            "name=run",
            "device=cpu",
            f"global_batch_size={options.batch}",
            "epochs=1000000",
            "log_every_steps=20",
            "eval_batch_size=1000",
            f"max_steps={3 * options.segment * (options.rounds + 1) + 1}",
        ]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc_per_node=2",
                "-m",
                "ddp_trainer",
                *words,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ
            | {
                "PYTHONPATH": paths,
                "DDP_TRAINER_PLUGINS": "switching",
                "OMP_NUM_THREADS": "1",
            },
        )
        ranks = [
            [json.loads(line) for line in (Path(name) / f"{rank}.jsonl").open()][4:]
            for rank in (0, 1)
        ]
    for kind in (1, 2):
        shares = [
            inside / wall
            for segments in ranks
            for number, wall, _, inside in segments
            if number == kind
        ]
        print(
            f"time inside, {KINDS[kind]}: {statistics.median(shares):.2%} of the steps (n ="
            f" {len(shares)})"
        )
    for place, what in ((1, "wall time"), (2, "processor time")):
        for kind in (1, 2):
            ratios = []
            for segments in ranks:
                by_round = [segments[start : start + 3] for start in range(0, len(segments) - 2, 3)]
                for one in by_round:
                    seconds = {number: values[place - 1] for number, *values in one}
                    ratios.append(seconds[kind] / seconds[kind - 1] - 1)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{what}, {KINDS[kind]} over {KINDS[kind - 1]}: {middle:+.2%} ({low:+.2%} to"
                f" {high:+.2%}, n = {len(ratios)})"
            )


if __name__ == "__main__":
    main()
