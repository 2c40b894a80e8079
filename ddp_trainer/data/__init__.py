"""What the images are, who sees which, how they are changed on the way, and the batches that come out."""

from ddp_trainer.data.augment import Augmentation
from ddp_trainer.data.loader import Batch, EvaluationLoader, ResidentLoader
from ddp_trainer.data.sampler import GlobalBatchSampler
from ddp_trainer.data.sources import ImageSet, Splits, load_splits, prepare

__all__ = [
    "Augmentation",
    "Batch",
    "EvaluationLoader",
    "GlobalBatchSampler",
    "ImageSet",
    "ResidentLoader",
    "Splits",
    "load_splits",
    "prepare",
]
