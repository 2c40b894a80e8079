"""Fashion-MNIST with 2 % wrong labels, to measure how many of them `inspect` finds:

    python benchmarks/wrong_labels.py folder
    export DATA="data=manifest data.file=folder/labels.csv data.image_size=28 data.channels=1
        data.mean=[0.286] data.std=[0.353] data.augment.random_resized_crop=null data.cache=uint8"
    python -m ddp_trainer --multirun experiment=fashion_mnist_lenet_fast $DATA name=folds \
        epochs=12 optimizer.lr=0.1 data.fold=0,1,2,3,4
    python -m ddp_trainer inspect $DATA data.fold=0 'runs=[outputs/folds/*]' output=found.html
    python benchmarks/wrong_labels.py folder --found found.json

The first command writes the training images of Fashion-MNIST as PNG files, and a table of their
labels, of which some are replaced by another class at random. The last one prints the shares.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
from PIL import Image

from ddp_trainer import ImageTensors
from ddp_trainer.config.data import FashionMnistConfig
from ddp_trainer.data.datasets.fashion_mnist import build_fashion_mnist

SHARE = 0.02


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--found", type=Path, help="the JSON file of inspect")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    datasets = build_fashion_mnist(FashionMnistConfig())
    assert isinstance(datasets.train, ImageTensors)
    labels = datasets.train.labels.numpy()
    random = np.random.default_rng(options.seed)
    wrong = random.choice(len(labels), round(SHARE * len(labels)), replace=False)
    if options.found is None:
        shown = labels.copy()
        shown[wrong] = (shown[wrong] + random.integers(1, 10, len(wrong))) % 10
        options.folder.mkdir(parents=True)
        with open(options.folder / "labels.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "label"])
            for number, image in enumerate(datasets.train.images):
                Image.fromarray(image[0].numpy()).save(options.folder / f"{number}.png")
                writer.writerow([f"{number}.png", datasets.class_names[shown[number]]])
        return
    suspects = json.loads(options.found.read_text())["suspected_labels"]
    found = {int(Path(suspect["path"]).stem) for suspect in suspects}
    print(f"{len(found & {*wrong}) / len(wrong):.1%} of the wrong labels are suspected")
    print(f"{len(found - {*wrong}) / (len(labels) - len(wrong)):.2%} of the right labels")


if __name__ == "__main__":
    main()
