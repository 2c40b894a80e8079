"""Random images of any shape: a pattern for each class, which a model can learn, and noise."""

import torch

from ddp_trainer.config.data import SyntheticConfig
from ddp_trainer.data.dataset import Datasets, ImageTensors
from ddp_trainer.distributed.seeding import generator


def build_synthetic(config: SyntheticConfig) -> Datasets:
    """Return noisy copies of one random pattern per class, which depend on the config alone."""
    shape = (config.channels, config.height, config.width)
    patterns = torch.randint(
        256,
        (config.num_classes, *shape),
        dtype=torch.uint8,
        generator=generator(config.seed, purpose="patterns"),
    )

    def split(count: int, purpose: str) -> ImageTensors:
        random = generator(config.seed, purpose=purpose)
        labels = torch.randint(config.num_classes, (count,), generator=random)
        noise = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=random)
        return ImageTensors(noise // 2 + patterns[labels] // 2, labels, center_crop=1)

    return Datasets(
        train=split(config.num_train, "train"),
        eval=split(config.num_eval, "eval"),
        class_names=[f"class {number}" for number in range(config.num_classes)],
    )
