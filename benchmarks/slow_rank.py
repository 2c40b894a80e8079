"""Train on the digits while the last rank takes twice as long for each forward pass.

torchrun --nproc_per_node=3 benchmarks/slow_rank.py sync=async_parameter_server seed=1

A forward pass lasts 20 ms, as on a device of its own, and 40 ms on the last rank. Prints images per
second and the accuracy; of an asynchronous training also the mean and the maximum staleness.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from ddp_trainer import Config, register_model, run
from ddp_trainer.config.errors import config_class
from ddp_trainer.config.models import LeNetConfig
from ddp_trainer.models import build_model

WORDS = (
    "data=digits",
    "epochs=25",
    "global_batch_size=24",
    "log_every_steps=60",
    "logger=[jsonl]",
    "report=false",
    "num_threads=1",
)


@config_class
class SlowConfig(LeNetConfig):
    name: str = "slow"
    seconds: float = 0.02


class Slow(nn.Module):
    """A model whose forward pass lasts at least so many seconds in training."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model = model
        self.seconds = seconds

    def forward(self, images: Tensor) -> Tensor:
        end = time.perf_counter() + self.seconds
        logits = self.model(images)
        if self.training:
            time.sleep(max(0.0, end - time.perf_counter()))
        return logits


@register_model("slow", SlowConfig)
def build_slow(config: SlowConfig, *, image_shape: tuple[int, int, int], num_classes: int) -> Slow:
    model = build_model(LeNetConfig(), image_shape=image_shape, num_classes=num_classes)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    return Slow(model, config.seconds * (2 if is_last else 1))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Config.compose(*WORDS, *sys.argv[1:])
        summary = run(replace(config, model=SlowConfig()), Path(folder, "run"))
        if int(os.environ["RANK"]) > 0:
            return
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
        stale = [r for r in map(json.loads, lines) if "staleness/mean" in r]
        print(f"{' '.join(sys.argv[1:])}: {summary.images_per_second:,.0f} images/s", end="")
        print(f", accuracy {summary.eval_top1:.4f}", end="")
        if stale:
            mean = sum(record["staleness/mean"] for record in stale) / len(stale)
            print(f", staleness {mean:.2f}, max {max(r['staleness/max'] for r in stale)}", end="")
        print()


if __name__ == "__main__":
    main()
