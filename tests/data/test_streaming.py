"""Batches of a map-style data set: those that its images would give from memory, read ahead in
order by threads.
"""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import world_of
from test_loader import CPU, image_set, normalize, resident
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.config.images import DataConfig
from ddp_trainer.data.dataset import Datasets, ImageTensors, read_sample
from ddp_trainer.data.held_out import hold_out
from ddp_trainer.data.loaders import EvaluationLoader, ResidentReader, TrainLoader
from ddp_trainer.data.readers import BATCHES_AHEAD, SampleReader

NUM_CLASSES = 10


class Samples(Dataset[tuple[Tensor, int]]):
    """The samples of `split`; early ones take longest to read. Counts the reads."""

    def __init__(self, split: ImageTensors, *, delay: float = 0.0) -> None:
        self.split = split
        self.delay = delay
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads.append(index)
        time.sleep(self.delay * (len(self) - index) / len(self))
        return self.split.images[index], int(self.split.labels[index])


class Changed(Samples):
    """The samples of `split`, in which sample 11 is `sample` instead; an exception is raised."""

    def __init__(self, sample: Any) -> None:
        super().__init__(image_set(20))
        self.sample = sample

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 11 and isinstance(self.sample, Exception):
            raise self.sample
        return self.sample if index == 11 else super().__getitem__(index)


def reader(samples: Dataset[Any], *, num_workers: int = 2) -> SampleReader:
    return SampleReader(
        samples, image_shape=(2, 5, 7), num_classes=NUM_CLASSES, num_workers=num_workers
    )


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_training_batches_are_those_from_memory(num_workers: int, world_size: int) -> None:
    images = image_set(23)
    for rank in range(world_size):
        in_memory = resident(images, rank=rank, world_size=world_size)
        streamed = TrainLoader(
            reader(Samples(images, delay=0.01), num_workers=num_workers),
            sampler=in_memory.sampler,
            augmentation=in_memory.augmentation,
            normalize=normalize(),
            device=CPU,
            num_classes=10,
        )
        for epoch, step in ((0, 0), (4, 1)):
            in_memory.sampler.set_epoch(epoch, step)
            for batch, expected in zip(streamed, in_memory, strict=True):
                for tensor, other in zip(batch, expected, strict=True):
                    assert torch.equal(tensor, other)
        assert reader_threads() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_epoch_that_is_resumed_reads_no_sample_from_before_its_cursor(rank: int) -> None:
    images = image_set(230)
    samples = Samples(images)
    in_memory = resident(images, rank=rank, world_size=2)
    streamed = TrainLoader(
        reader(samples),
        sampler=in_memory.sampler,
        augmentation=in_memory.augmentation,
        normalize=normalize(),
        device=CPU,
        num_classes=10,
    )
    streamed.sampler.set_epoch(1, 20)
    batches = [batch.ids.tolist() for batch in streamed]
    assert len(batches) == 230 // 7 - 20
    assert sorted(samples.reads) == sorted(number for batch in batches for number in batch)


@pytest.mark.parametrize(("count", "world_size"), [(23, 1), (23, 3), (2, 3)])
def test_evaluation_batches_are_those_from_memory(count: int, world_size: int) -> None:
    images = image_set(count)
    for rank in range(world_size):
        streamed, in_memory = (
            EvaluationLoader(source, normalize(), world_of(rank, world_size), batch_size=8)
            for source in (reader(Samples(images)), ResidentReader(images, device=CPU))
        )
        for batch, expected in zip(streamed, in_memory, strict=True):
            for tensor, other in zip(batch, expected, strict=True):
                assert torch.equal(tensor, other)
    assert reader_threads() == []


def test_only_so_many_batches_are_read_ahead() -> None:
    samples = Samples(image_set(60))
    size = 5
    shares = torch.arange(60).split(size)
    for number, _ in enumerate(reader(samples, num_workers=4).read(shares), 1):
        deadline = time.monotonic() + 30
        while len(samples.reads) < (number + BATCHES_AHEAD) * size and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # time to read more
        assert len(samples.reads) == (number + BATCHES_AHEAD) * size
        if number == 3:
            break


def test_an_iteration_that_is_left_early_ends_its_threads_and_reads_no_more() -> None:
    samples = Samples(image_set(60), delay=0.02)
    for _ in reader(samples).read(torch.arange(60).split(2)):
        assert reader_threads()
        break
    assert reader_threads() == []
    count = len(samples.reads)
    assert count <= 2 * (1 + BATCHES_AHEAD)
    time.sleep(0.1)
    assert len(samples.reads) == count


def test_a_pil_image_with_a_palette_is_read_as_rgb() -> None:
    image = Image.new("RGB", (4, 3), (10, 200, 30)).quantize()
    pixels, _ = read_sample([(image, 1)], 0)  # type: ignore[arg-type]
    assert pixels.shape == (3, 3, 4)
    assert pixels[:, 0, 0].tolist() == list(image.convert("RGB").getpixel((0, 0)))  # type: ignore[arg-type]


PIXELS = torch.zeros(2, 5, 7, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            OSError("image file is truncated"),
            "sample 11 of Changed cannot be read: OSError: image file is truncated",
        ),
        (PIXELS, "sample 11 of Changed cannot be read: TypeError: "),
        ((PIXELS, None), "sample 11 of Changed cannot be read: TypeError: "),
        (
            (PIXELS.float(), 3),
            r"sample 11 of Changed must be a uint8 tensor \[C, H, W\] or a PIL image and is "
            r"torch.float32 \[2, 5, 7\]",
        ),
        (
            (PIXELS[:, :4], 3),
            r"sample 11 of Changed has the shape \[2, 4, 7\], the first image \[2, 5, 7\]",
        ),
        ((PIXELS, 10), "sample 11 of Changed has the label 10: labels must be 0 to 9"),
        ((PIXELS, -1), "sample 11 of Changed has the label -1: labels must be 0 to 9"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(sample: Any, message: str) -> None:
    batches = reader(Changed(sample)).read(torch.arange(20).split(5))
    for _ in range(2):
        next(batches)
    with pytest.raises((RuntimeError, ValueError), match=f"^{message}") as refused:
        next(batches)
    assert reader_threads() == []  # although the traceback still refers to the iterators
    del refused


def test_a_lack_of_memory_is_not_the_fault_of_a_sample() -> None:
    with pytest.raises(MemoryError):
        list(reader(Changed(MemoryError())).read(torch.arange(20).split(5)))


def test_a_held_out_sample_is_named_as_in_the_whole_data_set() -> None:
    samples = Changed(OSError("truncated"))
    held_out = hold_out(
        Datasets(train=samples, eval=samples, class_names=["a"] * NUM_CLASSES),
        DataConfig(name="changed", validation_fraction=0.5),
    )
    for split in (held_out.train, held_out.eval):
        if 11 in split.indices:  # type: ignore[union-attr]
            with pytest.raises(RuntimeError, match=r"^sample 11 of Changed cannot be read"):
                read_sample(split, split.indices.index(11))  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(
    ("mode", "shape"), [("L", (1, 4, 6)), ("RGB", (3, 4, 6)), ("RGBA", (4, 4, 6))]
)
def test_a_pil_image_is_its_pixels(mode: str, shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(256, size=(4, 6, shape[0]), dtype=np.uint8)
    image = Image.fromarray(pixels.squeeze(), mode=None)
    assert image.mode == mode
    tensor, label = read_sample([(image, torch.tensor(3))], 0)  # type: ignore[arg-type]
    assert torch.equal(tensor, torch.from_numpy(pixels).permute(2, 0, 1))
    assert label == 3
