"""Read a folder of photographs through ddp_trainer and through other loaders, interleaved, and
print their speed.

    python benchmarks/image_pipelines.py

The photographs are parts of those in Debian's packages mate-backgrounds and ukui-wallpapers: 2,112
JPEGs of 500×375 pixels. Every pipeline gives batches of 64 random parts of them, scaled to 224×224
pixels, with two workers. A round runs each pipeline once, in a process of its own, and measures its
second epoch. By then the workers have started, and ddp_trainer has built its cache and compared the
checksum of each image that it has read from there. The pipelines give float32 images, mirrored at
random and normalized on the CPU, or uint8 images that are not normalized. The uint8 images of
torchvision are mirrored at random; those of ddp_trainer are not, because a training mirrors and
normalizes them on its device.
"""

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import datasets
from torchvision.transforms import v2

PACKAGES = ("mate-backgrounds", "ukui-wallpapers")
SOURCE = Path("/usr/share/backgrounds")
COUNT = 2112
CLASSES = 8
WIDTH = 500
HEIGHT = 375
QUALITY = 96
SIZE = 224
BATCH_SIZE = 64
WORKERS = 2
MEAN = [0.485, 0.456, 0.406]
STD = [0.229, 0.224, 0.225]
REFERENCE = "torchvision's reference"


def write_photos(folder: Path) -> None:
    """Write `COUNT` JPEGs: random parts of Debian's photographs, of a quarter to all of their
    width.
    """
    sources = sorted(SOURCE.rglob("*.jpg"))
    if not sources:
        sys.exit(f"there are no photographs in {SOURCE}: apt-get install {' '.join(PACKAGES)}")
    Image.MAX_IMAGE_PIXELS = None
    chance = random.Random(0)
    for number, source in enumerate(sources):
        photo = Image.open(source).convert("RGB")
        target = folder / "train" / f"class {number % CLASSES}"
        target.mkdir(parents=True, exist_ok=True)
        for part in range(number, COUNT, len(sources)):
            width = int(min(photo.width, photo.height * WIDTH / HEIGHT) * chance.uniform(0.25, 1))
            height = width * HEIGHT // WIDTH
            left = chance.randint(0, photo.width - width)
            top = chance.randint(0, photo.height - height)
            box = (left, top, left + width, top + height)
            small = photo.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS, box=box)
            small.save(target / f"{part}.jpg", quality=QUALITY)


# --- pipelines: each returns a function that iterates over an epoch and yields batches of images --

Epoch = Callable[[], Iterable[torch.Tensor]]


def torchvision_loader(folder: Path, *, to_float: bool) -> DataLoader[Any]:
    """Return the loader of torchvision's references/classification, with its PIL backend."""
    end = [v2.ToDtype(torch.float, scale=True), v2.Normalize(MEAN, STD)] if to_float else []
    crop = v2.RandomResizedCrop(SIZE, scale=(0.25, 1.0), antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor(), *end])
    return DataLoader(
        datasets.ImageFolder(str(folder / "train"), transform),
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )


def torchvision_reference(folder: Path, cache_dir: Path) -> Epoch:
    loader = torchvision_loader(folder, to_float=True)
    return lambda: (images for images, _ in loader)


def torchvision_uint8(folder: Path, cache_dir: Path) -> Epoch:
    loader = torchvision_loader(folder, to_float=False)
    return lambda: (images for images, _ in loader)


def timm_loader(folder: Path, cache_dir: Path) -> Epoch:
    """The loader of timm's train.py, without the augmentation that the others do not have."""
    from timm.data import create_dataset, create_loader

    dataset: Any = create_dataset(
        "", root=str(folder), split="train", is_training=True, batch_size=BATCH_SIZE
    )
    loader = create_loader(
        dataset,
        (3, SIZE, SIZE),
        BATCH_SIZE,
        is_training=True,
        scale=(0.25, 1.0),
        color_jitter=0.0,
        hflip=0.5,
        interpolation="bilinear",
        num_workers=WORKERS,
        persistent_workers=True,
        device=torch.device("cpu"),
    )
    return lambda: (images for images, _ in loader)


def lightning_trainer(folder: Path, cache_dir: Path) -> Epoch:
    """torchvision's loader inside of Lightning's loop, with a model of one weight."""
    import lightning  # pyright: ignore[reportMissingImports]

    class OneWeight(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            counts.append(len(batch[0]))
            return batch[0][:, 0, 0, 0].mean() * self.weight

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    counts: list[int] = []
    loader = torchvision_loader(folder, to_float=True)
    model = OneWeight()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def epoch() -> Iterable[torch.Tensor]:
        counts.clear()
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs += 1
        trainer.fit(model, loader)
        return (torch.empty(count, 3, SIZE, SIZE) for count in counts)

    return epoch


def ours(folder: Path, cache_dir: Path, *, cache: str, to_float: bool) -> Epoch:
    from ddp_trainer import Config
    from ddp_trainer.config.data import Cache, ImageFolderConfig
    from ddp_trainer.data.build import build_datasets, build_loaders
    from ddp_trainer.distributed.environment import Environment
    from ddp_trainer.distributed.process_group import process_group
    from ddp_trainer.runtime import keep_freed_memory

    keep_freed_memory()  # as a training on a CPU does
    data = ImageFolderConfig(
        root=str(folder),
        validation_fraction=0.01,
        num_workers=WORKERS,
        cache=Cache[cache],
        cache_dir=str(cache_dir),
    )
    with process_group(Environment(), **Config(data=data, num_threads=1).process_group) as world:
        loader = build_loaders(
            build_datasets(data),
            data,
            world=world,
            seed=0,
            global_batch_size=BATCH_SIZE,
            eval_batch_size=BATCH_SIZE,
            memory_format=torch.channels_last,
        ).train

    def epoch() -> Iterable[torch.Tensor]:
        sampler = loader.sampler
        sampler.set_epoch(sampler.epoch + 1)
        if to_float:
            return (batch.images for batch in loader)
        order = sampler.order()
        positions = sampler.positions()
        crops = loader.augmentation.draw(len(order), epoch=sampler.epoch)["crops"]
        batches = loader.reader.read(order[positions], crops[positions])
        return (images for images, _ in batches)

    return epoch


PIPELINES: dict[str, Callable[[Path, Path], Epoch]] = {
    REFERENCE: torchvision_reference,
    "torchvision's, uint8": torchvision_uint8,
    "Lightning with torchvision's": lightning_trainer,
    "timm's": timm_loader,
    "ddp_trainer": lambda folder, cache: ours(folder, cache, cache="none", to_float=True),
    "ddp_trainer, uint8": lambda folder, cache: ours(folder, cache, cache="none", to_float=False),
    "ddp_trainer with its cache": lambda folder, cache: ours(
        folder, cache, cache="uint8", to_float=True
    ),
    "ddp_trainer with its cache, uint8": lambda folder, cache: ours(
        folder, cache, cache="uint8", to_float=False
    ),
}


# --- measurement ----------------------------------------------------------------------------------


def cpu_seconds(pid: int | str = "self") -> float:
    """Return the CPU time of a process and of those that it has started, ended or not."""
    root = Path(f"/proc/{pid}")
    # of its own, and of those that have ended
    times = (root / "stat").read_text().rpartition(")")[2].split()[11:15]
    children = [
        child
        for task in (root / "task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


def measure(name: str, folder: Path, cache_dir: Path) -> dict[str, float]:
    """Return the images per second, of the clock and of the CPU, of the second epoch."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    epoch = PIPELINES[name](folder, cache_dir)
    for images in epoch():
        assert images.shape[1:] == (3, SIZE, SIZE)
    began = time.perf_counter()
    used = cpu_seconds()
    count = 0
    for images in epoch():
        count += len(images)
    return {
        "per second": count / (time.perf_counter() - began),
        "per CPU-second": count / (cpu_seconds() - used),
    }


def run_rounds(
    names: list[str], folder: Path, cache_dir: Path, *, rounds: int
) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            command = [
                sys.executable,
                __file__,
                f"--pipeline={name}",
                f"--folder={folder}",
                f"--cache-dir={cache_dir}",
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
        print(f"  round {number + 1} of {rounds}", flush=True)
    return results


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Return a table in Markdown: medians, and the ratios of each round to the reference of that
    round.
    """
    lines = [
        "| pipeline | images/s | × (min–max) | per CPU-second | × (min–max) |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, rounds in results.items():
        cells = []
        for key in ("per second", "per CPU-second"):
            ratios = [
                own[key] / other[key] for own, other in zip(rounds, results[REFERENCE], strict=True)
            ]
            cells.append(f"{statistics.median(values[key] for values in rounds):,.0f}")
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw the images per CPU-second: medians as bars, ranges as whiskers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    values = {
        name: [result["per CPU-second"] for result in rounds]
        for name, rounds in reversed(results.items())
    }
    medians = [statistics.median(value) for value in values.values()]
    ends = [
        [m - min(v) for m, v in zip(medians, values.values(), strict=True)],
        [max(v) - m for m, v in zip(medians, values.values(), strict=True)],
    ]
    colors = ["#2a78b5" if name.startswith("ddp_trainer") else "#9aa5ad" for name in values]
    bars = axes.barh(list(values), medians, xerr=ends, color=colors, capsize=2)
    axes.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=6)
    axes.set_xlabel("images per CPU-second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--pipeline",
        choices=PIPELINES,
        help="run only this one, once, and print its figures as JSON",
    )
    parser.add_argument(
        "--folder", type=Path, help="the photographs; made in a temporary folder unless given"
    )
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch) / "photos"
        cache_dir = options.cache_dir or Path(scratch) / "cache"
        if not folder.is_dir():
            write_photos(folder)
        if options.pipeline:
            print(json.dumps(measure(options.pipeline, folder, cache_dir)))
            return
        size = sum(path.stat().st_size for path in folder.rglob("*.jpg")) / COUNT / 1e3
        print(
            f"{COUNT:,} JPEGs of {WIDTH}×{HEIGHT} pixels and {size:.0f} KB, torch"
            f" {torch.__version__}"
        )
        results = run_rounds(list(PIPELINES), folder, cache_dir, rounds=options.rounds)
        print(table(results))
        if options.picture:
            draw(results, options.picture)


if __name__ == "__main__":
    main()
