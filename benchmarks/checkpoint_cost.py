"""Measure what checkpoints cost: LeNet on Fashion-MNIST, 2 ranks, with a save every 20 steps and
without, in turn.

python benchmarks/checkpoint_cost.py --rounds 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--master-addr=127.0.0.1",
    "--nproc_per_node=2",
)


def images_per_second(folder: str, *overrides: str) -> float:
    """Return the throughput of one launch: the median over windows of 20 steps, each with one save
    or none.
    """
    arguments = (
        "model=lenet",
        "data=fashion_mnist",
        "max_steps=600",
        f"output_dir={folder}",
        "resume=never",
    )
    subprocess.run(
        [*TORCHRUN, "-m", "ddp_trainer", *arguments, "name=run", *overrides],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return json.loads((Path(folder) / "run/summary.json").read_text())["images_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    ratios = []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory() as folder:
            without = images_per_second(folder)
            saving = images_per_second(folder, "checkpoint.every_steps=20")
        ratios.append(saving / without)
        print(
            f"without {without:,.0f} img/s · saving {saving:,.0f} img/s · ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
