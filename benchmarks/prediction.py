"""Classify the same photographs with ``predict`` and with ``evaluate``, in interleaved rounds, and
print both speeds.

    python benchmarks/prediction.py

Each command runs in one process of its own and prints its own speed. Both begin to measure before
the first batch is read. ``predict`` measures until it has printed its last line, ``evaluate`` until
its last batch, before it writes its files. The photographs are those of image_pipelines.py. The
small model shows the cost of reading and writing, the large one that of a forward pass.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from image_pipelines import write_photos

ROUNDS = 5
MODELS = {
    "LeNet, 64×64": ("model=lenet", "data.image_size=64"),
    "ResNet-18, 128×128": ("model=resnet18", "data.image_size=128"),
}


def run(*words: str) -> str:
    """Run a command of ddp_trainer and return its output; that of predict is dropped."""
    done = subprocess.run(
        [sys.executable, "-m", "ddp_trainer", *words], capture_output=True, text=True, check=True
    )
    return done.stderr if words[0] == "predict" else done.stdout


def rate(output: str) -> float:
    """Return the images per second that a command printed."""
    return float(re.findall(r"([\d,]+) img/s", output)[0].replace(",", ""))


def measure(folder: Path, words: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the images per second of both commands in each round."""
    name = words[0].partition("=")[2]
    run(
        "train",
        *words,
        "data=imagefolder",
        f"data.root={folder}",
        "data.validation_fraction=0.5",
        "max_steps=1",
        "global_batch_size=64",
        f"data.cache_dir={folder}",
        f"output_dir={folder}",
        f"name={name}",
        "precision=fp32",
        "logger=[]",
    )
    run_dir = str(folder / name)
    rates = {"evaluate": [], "predict": []}
    for _ in range(ROUNDS):
        rates["evaluate"].append(
            rate(
                run(
                    "evaluate",
                    run_dir,
                    "checkpoint=last",
                    f"data.root={folder / 'train'}",
                    "split=test",
                    "eval_batch_size=64",
                )
            )
        )
        rates["predict"].append(
            rate(run("predict", run_dir, str(folder / "train"), "checkpoint=last"))
        )
    return rates


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write_photos(Path(name))
        for model, words in MODELS.items():
            rates = measure(Path(name), words)
            ratios = [p / e for e, p in zip(rates["evaluate"], rates["predict"], strict=True)]
            medians = {command: statistics.median(values) for command, values in rates.items()}
            print(
                f"{model}: {json.dumps(medians)} img/s, predict / evaluate"
                f" {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
