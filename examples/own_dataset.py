"""A data set of your own, whose pictures are drawn: python examples/own_dataset.py

    export PYTHONPATH=examples DDP_TRAINER_PLUGINS=own_dataset
    NPROC=2 launch/local.sh data=bars model=lenet

A split is a map-style data set of pairs: an image, uint8 [C, H, W], and a label, int. The method
`read` makes random crops possible, and `labels` a stratified validation split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer import Config, DataConfig, Datasets, launch, register_dataset
from ddp_trainer.schemas import FileAugmentConfig


@dataclass(kw_only=True, slots=True)
class BarsConfig(DataConfig):
    name: str = "bars"
    count: int = 480
    """Number of training images; the evaluation split has a quarter of this number."""
    augment: FileAugmentConfig = field(default_factory=FileAugmentConfig)  # type: ignore[override]


class Bars(Dataset[tuple[Tensor, int]]):
    """Pictures of 16×16 pixels with a horizontal (class 0) or a vertical bar (class 1)."""

    def __init__(self, count: int, seed: int) -> None:
        self.labels = torch.arange(count) % 2
        self.places = torch.randint(3, 13, (count,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(index, None)

    def read(self, index: int, draws: Sequence[float] | None) -> tuple[Tensor, int]:
        """Return an image and its label. draws: random numbers in [0, 1); None: in evaluation."""
        image = torch.zeros(16, 16, dtype=torch.uint8)
        shift = 0 if draws is None else round(4 * draws[0]) - 2
        image[int(self.places[index]) + shift] = 255
        return (image.T if self.labels[index] else image)[None], int(self.labels[index])


@register_dataset("bars", BarsConfig)
def build_bars(config: BarsConfig) -> Datasets:
    train = Bars(config.count, seed=0)
    return Datasets(train, Bars(config.count // 4, seed=1), ["horizontal", "vertical"])


if __name__ == "__main__":
    config = Config(
        model="lenet", data="bars", optimizer={"lr": 0.01}, epochs=4, global_batch_size=24
    )
    print(f"top-1 {launch(config, num_ranks=2).eval_top1:.4f}")
