"""Circles, squares and triangles that are drawn when they are read: a map-style data set of PIL
images.
"""

from random import Random

from PIL import Image, ImageDraw
from torch.utils.data import Dataset

from ddp_trainer import Datasets
from example_plugin import ShapesConfig

CLASS_NAMES = ["circle", "square", "triangle"]


class Shapes(Dataset[tuple[Image.Image, int]]):
    """`count` images; each is a function of the split and the index, so that it is the same on
    every rank.
    """

    def __init__(self, split: str, count: int, *, size: int) -> None:
        self.split = split
        self.count = count
        self.size = size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label = index % len(CLASS_NAMES)
        random = Random(f"{self.split} {index}")
        background, color = (tuple(random.choices(range(256), k=3)) for _ in range(2))
        image = Image.new("RGB", (self.size, self.size), background)
        radius = random.randint(self.size // 5, self.size // 3)
        x, y = (random.randint(radius, self.size - radius) for _ in range(2))
        draw = ImageDraw.Draw(image)
        if CLASS_NAMES[label] == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
        else:
            num_sides = 4 if CLASS_NAMES[label] == "square" else 3
            draw.regular_polygon((x, y, radius), num_sides, fill=color)
        return image, label


def build_shapes(config: ShapesConfig) -> Datasets:
    train, evaluation = (
        Shapes(split, count, size=config.size)
        for split, count in (("train", config.num_train), ("eval", config.num_eval))
    )
    return Datasets(train=train, eval=evaluation, class_names=CLASS_NAMES)
