"""The pictures of a run's start: what the model sees, and the sizes of the classes."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from runs import TINY, train_on
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from ddp_trainer.observers.pictures import bars_png, grid_png
from ddp_trainer.scores.pictures import BLUE


def read_png(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_grid_shows_the_pixels_before_normalization(channels: int) -> None:
    pixels = torch.randint(256, (5, channels, 8, 6), generator=torch.Generator().manual_seed(0))
    mean = [0.5] * channels
    std = [0.25] * channels
    picture = read_png(grid_png((pixels / 255 - 0.5) / 0.25, mean=mean, std=std))
    assert picture.shape == (2 * 10 + 2, 3 * 8 + 2, 3)  # two rows of three, with a border of 2
    for number in range(5):
        top = 2 + 10 * (number // 3)
        left = 2 + 8 * (number % 3)
        shown = picture[top : top + 8, left : left + 6]
        expected: Tensor = pixels[number] if channels == 3 else pixels[number, :1].expand(3, 8, 6)
        assert np.abs(shown.astype(int) - expected.permute(1, 2, 0).numpy()).max() <= 1


def test_bars_are_as_long_as_the_classes_are_large() -> None:
    picture = read_png(bars_png(["ä\n" * 30, "two", "none"], [50, 100, 0]))
    blue = (picture == BLUE).all(-1).sum(1)
    assert [round(blue[16 * row + 16] / 300, 2) for row in range(3)] == [1.0, 0.5, 0.0]
    many = read_png(bars_png([str(n) for n in range(500)], list(range(500))))
    assert len(many) == 41 * 16


def test_tensorboard_has_pictures_of_the_start_and_of_evaluations(tmp_path: Path) -> None:
    words = (*TINY, f"output_dir={tmp_path}", "name=run", "epochs=3")
    train_on(2, *words, "max_steps=3")
    train_on(2, *words)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0})
    events.Reload()
    steps = {"train/class_sizes": [0], "train/first_batch": [0]}
    # the ends of launches, and epochs 1, 2, 4 …
    steps |= {tag: [3, 8, 16, 24] for tag in ("eval/confusion_matrix", "eval/mistakes")}
    assert {
        tag: [image.step for image in events.Images(tag)] for tag in events.Tags()["images"]
    } == steps
    for tag in steps:
        assert all(
            read_png(image.encoded_image_string).std() > 5 for image in events.Images(tag)
        ), tag
    for name in ("class_sizes", "first_batch"):
        [image] = events.Images(f"train/{name}")
        assert image.encoded_image_string == (tmp_path / f"run/pictures/{name}.png").read_bytes()
        assert (image.height, image.width) == read_png(image.encoded_image_string).shape[:2]
