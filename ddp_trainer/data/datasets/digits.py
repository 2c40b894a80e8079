"""Handwritten digits of 8×8 pixels, from files inside the package."""

from pathlib import Path

from torch.nn.functional import one_hot

from ddp_trainer.config.data import DigitsConfig
from ddp_trainer.data.dataset import Datasets, ImageTensors
from ddp_trainer.data.datasets.idx import read_split


def build_digits(config: DigitsConfig) -> Datasets:
    """Return 1,797 handwritten digits; every fifth image of each class is for evaluation.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
    Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0 (the part that scikit-learn ships).
    """
    digits = read_split(Path(__file__).parent, "digits")
    images = digits.images * 15  # the stored values are 0 … 16, the pixels 0 … 240
    # the number of each image within its class, counted from 1: int64 [N]
    nth_of_class = one_hot(digits.labels).cumsum(0).gather(1, digits.labels[:, None])[:, 0]
    held_out = nth_of_class % 5 == 0
    return Datasets(
        train=ImageTensors(images[~held_out], digits.labels[~held_out], center_crop=1),
        eval=ImageTensors(images[held_out], digits.labels[held_out], center_crop=1),
        class_names=[str(digit) for digit in range(10)],
    )
