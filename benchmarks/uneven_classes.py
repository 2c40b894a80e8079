"""Fashion-MNIST with uneven classes, 100:1, to compare data.sampling and loss.class_weights:

    export PYTHONPATH=benchmarks DDP_TRAINER_PLUGINS=uneven_classes
    python -m ddp_trainer --multirun data=uneven_fashion_mnist model=lenet epochs=10 seed=0,1,2 \
        'data.order_seed=${seed}' 'metric=[balanced_accuracy,macro_f1]' \
        select_by=eval/balanced_accuracy data.sampling=uniform,sqrt,balanced
    python -m ddp_trainer --multirun … loss.class_weights=balanced

The training images are a part of those of Fashion-MNIST. Which classes are small depends on
data.order_seed. The test images are all of those of Fashion-MNIST.
"""

from dataclasses import dataclass

import torch

from ddp_trainer import Datasets, ImageTensors, register_dataset
from ddp_trainer.config.data import FashionMnistConfig
from ddp_trainer.data.datasets.fashion_mnist import build_fashion_mnist


@dataclass(kw_only=True, slots=True)
class UnevenConfig(FashionMnistConfig):
    name: str = "uneven_fashion_mnist"
    ratio: int = 100
    """The size of the largest class, divided by that of the smallest one."""
    order_seed: int = 0
    """Chooses which classes are small, and their images."""


@register_dataset("uneven_fashion_mnist", UnevenConfig)
def build_uneven(config: UnevenConfig) -> Datasets:
    """Return the data set; the sizes of the classes are a geometric series from 6,000 down."""
    datasets = build_fashion_mnist(FashionMnistConfig(root=config.root))
    train = datasets.train
    assert isinstance(train, ImageTensors)
    random = torch.Generator().manual_seed(config.order_seed)
    parts = []
    for place, label in enumerate(torch.randperm(10, generator=random).tolist()):
        ids = (train.labels == label).nonzero()[:, 0]
        count = round(len(ids) * config.ratio ** (-place / 9))
        parts.append(ids[torch.randperm(len(ids), generator=random)[:count]])
    ids = torch.cat(parts).sort().values
    return Datasets(
        ImageTensors(train.images[ids], train.labels[ids]), datasets.eval, datasets.class_names
    )
