"""Write a folder of JPEGs of 341×256 pixels in 100 classes, with smooth shapes and some noise.

python benchmarks/write_pictures.py folder --count=12800
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 100
SIZE = (341, 256)
QUALITY = 90


def write(number: int, folder: Path) -> None:
    """Write picture `number`, which depends on the number alone."""
    random = np.random.default_rng(number)
    shapes = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    pixels = np.asarray(shapes.resize(SIZE, Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += random.integers(-12, 13, pixels.shape, dtype=np.int16)
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    picture.save(folder / f"class-{number % CLASSES:02d}" / f"{number}.jpg", quality=QUALITY)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=12800)
    return parser.parse_args()


def main() -> None:
    options = parse()
    for number in range(CLASSES):
        (options.folder / f"class-{number:02d}").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        numbers = range(options.count)
        list(pool.map(partial(write, folder=options.folder), numbers, chunksize=64))


if __name__ == "__main__":
    main()
