"""Show what fine-tuning gains: a ResNet-18 trained on Fashion-MNIST goes on with a few handwritten
digits.

    python benchmarks/fine_tuning.py

Both data sets are written as folders of images. The digits have 20 training images a class. Each of
three seeds trains from random weights, from the weights of Fashion-MNIST, and with all of these but
the last layer frozen.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

from ddp_trainer.config.data import DigitsConfig, FashionMnistConfig
from ddp_trainer.config.images import DataConfig
from ddp_trainer.data.build import build_datasets
from ddp_trainer.data.dataset import ImageTensors

SIDE = 28
SEEDS = (0, 1, 2)
COMMON = (
    "data=imagefolder",
    f"data.image_size={SIDE}",
    "data.augment.random_hflip=false",
    "model=resnet18",
    "data.augment.random_resized_crop=0.6",
    "global_batch_size=50",
    "logger=[jsonl]",
    "checkpoint.keep_last=1",
)


def write_folder(
    folder: Path, config: DataConfig, *, train_per_class: int, eval_per_class: int
) -> None:
    """Write the first images of each class of a data set as PNG files of `SIDE` pixels."""
    datasets = build_datasets(config)
    for split, images, count in (
        ("train", datasets.train, train_per_class),
        ("val", datasets.eval, eval_per_class),
    ):
        assert isinstance(images, ImageTensors)
        for label, name in enumerate(datasets.class_names):
            target = folder / split / name.replace("/", " ")
            target.mkdir(parents=True)
            for number in torch.nonzero(images.labels == label).flatten()[:count].tolist():
                picture = Image.fromarray(images.images[number, 0].numpy()).resize(
                    (SIDE, SIDE), Image.Resampling.BICUBIC
                )
                picture.save(target / f"{number}.png")


def train(folder: Path, name: str, *words: str) -> float:
    """Train on two ranks and return the accuracy."""
    start = (
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master-addr=127.0.0.1",
        "--master-port=29517",
    )
    command = [
        sys.executable,
        *start,
        "-m",
        "ddp_trainer",
        *COMMON,
        f"output_dir={folder}",
        f"name={name}",
        *words,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads((folder / name / "summary.json").read_text())["eval/top1"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=15, help="of the digits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_folder(
            folder / "fashion", FashionMnistConfig(), train_per_class=600, eval_per_class=50
        )
        write_folder(folder / "digits", DigitsConfig(), train_per_class=20, eval_per_class=35)
        first = train(
            folder, "first", f"data.root={folder}/fashion", "epochs=4", "optimizer.lr=0.05"
        )
        print(f"ResNet-18 on 6,000 images of Fashion-MNIST: {first:.2%}", flush=True)
        weights = f"model.weights={folder}/first/checkpoints/best.pt"
        variants = {
            "from random weights": ("optimizer.lr=0.05",),
            "fine-tuned": (weights, "optimizer.lr=0.02"),
            "fine-tuned, backbone frozen": (
                weights,
                "optimizer.lr=0.05",
                "model.freeze=[backbone]",
            ),
        }
        for number, (variant, words) in enumerate(variants.items()):
            digits = (
                f"data.root={folder}/digits",
                f"epochs={options.epochs}",
                "checkpoint.keep_best=false",
                *words,
            )
            results = [train(folder, f"{number}-{seed}", *digits, f"seed={seed}") for seed in SEEDS]
            each = ", ".join(f"{result:.2%}" for result in results)
            print(f"200 digits, {variant}: {statistics.mean(results):.2%} ({each})", flush=True)


if __name__ == "__main__":
    main()
