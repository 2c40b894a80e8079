"""The pictures of a run's start: what the model sees, and the sizes of the classes."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont
from runs import TENSORBOARD, TINY, train_on
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from ddp_trainer.config.loggers import TensorBoardConfig
from ddp_trainer.data.dataset import ImageTensors
from ddp_trainer.data.loaders import Batch
from ddp_trainer.data.readers import NO_LABEL
from ddp_trainer.observers.loggers.tensorboard import TensorBoardLogger
from ddp_trainer.observers.pictures import Pictures, batch_png, sizes_text
from ddp_trainer.scores.pictures import (
    LINE,
    TILE,
    captioned_png,
    confusion_png,
    drawable,
    load_font,
)
from ddp_trainer.training.run import Events

IDS = torch.zeros(1, dtype=torch.int64)
TILE_HEIGHT = TILE + 12 + LINE


def read_png(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_first_batch_is_shown_before_normalization(channels: int, is_mixed: bool) -> None:
    pixels = torch.randint(256, (9, channels, 8, 6), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 1, 0, 0, NO_LABEL, 0, 0, 1])
    if is_mixed:
        labels = torch.stack([labels == 0, labels == 1], 1) * 0.6 + 0.2
    batch = Batch((pixels / 255 - 0.5) / 0.25, labels, torch.arange(9))
    mean = [0.5] * channels
    std = [0.25] * channels
    picture = read_png(batch_png(batch, ["cat", "dog"], mean=mean, std=std))
    assert picture.shape == (2 * TILE_HEIGHT, 8 * (TILE + 8), 3)  # eight in a row
    for number in range(9):
        top = 4 + TILE_HEIGHT * (number // 8)
        left = 4 + (TILE + 8) * (number % 8)
        shown = picture[top + 8 : top + TILE : 16, left + 8 : left + 6 * 16 : 16]  # 16 times larger
        expected: Tensor = pixels[number] if channels == 3 else pixels[number, :1].expand(3, 8, 6)
        assert np.abs(shown.astype(int) - expected.permute(1, 2, 0).numpy()).max() <= 1
    below = [picture[TILE + 4 : TILE_HEIGHT, (TILE + 8) * n : (TILE + 8) * (n + 1)] for n in (1, 2)]
    assert np.array_equal(below[0], below[1])
    assert not np.array_equal(below[0], picture[TILE + 4 : TILE_HEIGHT, : TILE + 8])


def test_the_first_batch_is_not_read_twice(tmp_path: Path) -> None:
    """The other ranks would wait for the second time, which may be minutes for large images."""
    calls: list[tuple[Any, ...]] = []
    loggers: Any = SimpleNamespace(loggers={"one": None}, call=lambda *call: calls.append(call))
    data = SimpleNamespace(class_names=["cat"], train=ImageTensors(torch.zeros(1, 1, 2, 2), IDS))
    loaders = SimpleNamespace(train=None, datasets=data, preprocessing={"mean": [0], "std": [1]})
    events = Events({"pictures": Pictures(loggers)})
    batch = Batch(torch.zeros(1, 1, 2, 2), IDS, IDS)
    run: Any = SimpleNamespace(
        step=1, batch=batch, loaders=loaders, run_dir=tmp_path, events=events
    )
    events.emit("on_step", run)
    assert [call[1] for call in calls] == ["train/first_batch", "class sizes"]
    run.step = 2
    events.emit("on_step", run)
    assert len(calls) == 2
    assert events.names_by_method["on_step"] == []


def test_the_first_batch_of_a_resumed_launch_is_not_recorded() -> None:
    loggers: Any = SimpleNamespace(loggers={"one": None})
    events = Events({"pictures": Pictures(loggers)})
    run: Any = SimpleNamespace(step=7, events=events)
    events.emit("on_step", run)
    assert events.names_by_method["on_step"] == []


@pytest.mark.parametrize("name", ["X", "W" * 90, "i" * 90, "sulphur-crested cockatoo"])
def test_the_class_name_below_an_image_is_large_and_not_wider_than_the_image(name: str) -> None:
    picture = read_png(captioned_png([torch.zeros(1, 8, 8, dtype=torch.uint8)], [[name]]))
    rows, columns = np.nonzero((picture[TILE + 4 :] < 200).all(axis=2))
    assert rows.max() - rows.min() >= 9  # pixels of a capital letter
    assert columns.max() < TILE + 8
    assert len(name) == 1 or columns.max() > 0.8 * TILE, "shortened as little as possible"


@pytest.mark.parametrize(
    ("name", "shown", "in_ascii"),
    [
        ("Käfer", "Käfer", "Kafer"),
        ("Ka\u0308fer", "Käfer", "Kafer"),
        ("Жук", "Жук", r"\u0416\u0443\u043a"),
        ("a\n\udcff", r"a\n\udcff", r"a\n\udcff"),
        ("\U0001f41e ant", r"\U0001f41e ant", r"\U0001f41e ant"),
    ],
)
def test_a_class_name_is_drawn_as_far_as_the_font_has_its_characters(
    name: str, shown: str, in_ascii: str
) -> None:
    assert drawable(name, load_font(15)) == shown  # tests have matplotlib, and so DejaVu Sans
    assert drawable(name, ImageFont.load_default(15)) == in_ascii
    assert captioned_png([torch.zeros(1, 8, 8, dtype=torch.uint8)], [[name]])


@pytest.mark.parametrize("count", [3, 60])
def test_long_class_names_stay_in_the_picture_of_a_matrix(count: int) -> None:
    picture = read_png(confusion_png(torch.eye(count, dtype=torch.int64), ["W" * 90] * count))
    assert (picture[40:, :4] == 255).all()


def test_class_sizes_are_sorted() -> None:
    lines = sizes_text(["ä", "two", "none", "a\n```"], [50, 1000, 0, 2]).splitlines()
    assert [line.split() for line in lines[1:-1]] == [
        ["1,000", "two"],
        ["50", "ä"],
        ["2", "a\\n```"],
        ["0", "none"],
    ]


def test_class_names_that_are_not_utf8_are_recorded(tmp_path: Path) -> None:
    logger = TensorBoardLogger(TensorBoardConfig(), tmp_path)
    logger.text("class sizes", sizes_text([os.fsdecode(b"caf\xe9")], [3]), 0)
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [sizes] = events.Tensors("class sizes/text_summary")
    assert rb"caf\udce9" in sizes.tensor_proto.string_val[0]


def test_tensorboard_has_pictures_of_the_start_and_of_evaluations(tmp_path: Path) -> None:
    words = (*TINY, TENSORBOARD, f"output_dir={tmp_path}", "name=run", "epochs=3")
    train_on(2, *words, "max_steps=3")
    train_on(2, *words)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0})
    events.Reload()
    steps = {"train/first_batch": [0]}
    # the ends of launches, and epochs 1, 2, 4 …
    steps |= {tag: [3, 8, 16, 24] for tag in ("eval/confusion_matrix", "eval/mistakes")}
    assert {
        tag: [image.step for image in events.Images(tag)] for tag in events.Tags()["images"]
    } == steps
    for tag in steps:
        assert all(
            read_png(image.encoded_image_string).std() > 5 for image in events.Images(tag)
        ), tag
    [image] = events.Images("train/first_batch")
    assert image.encoded_image_string == (tmp_path / "run/pictures/first_batch.png").read_bytes()
    assert (image.height, image.width) == read_png(image.encoded_image_string).shape[:2]
    [sizes] = events.Tensors("class sizes/text_summary")
    assert sizes.tensor_proto.string_val[0].count(b"\n") == 11  # a line for each of 10 classes
