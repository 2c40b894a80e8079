"""Score a trained model on a split with the code that evaluates during training."""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.data import OnBadImage, SplitName
from ddp_trainer.config.errors import flatten_keys
from ddp_trainer.data.dataset import sample_name
from ddp_trainer.data.loaders import EvaluationLoader, build_reader
from ddp_trainer.data.normalize import Normalize
from ddp_trainer.data.readers import Reader, read_images
from ddp_trainer.distributed.environment import Environment
from ddp_trainer.distributed.process_group import prepare, process_group
from ddp_trainer.distributed.world import World
from ddp_trainer.scores.files import FOLDER, write_evaluation
from ddp_trainer.scores.scores import Scores
from ddp_trainer.start import autocast_dtype, check_same, memory_format, set_torch_switches
from ddp_trainer.tools.splits import NamedSplit, choose_split
from ddp_trainer.tools.trained_model import TrainedModel, load_model
from ddp_trainer.training.bad_samples import BadSamples
from ddp_trainer.training.evaluation import evaluate

logger = logging.getLogger(__name__)


def score_run(
    run_dir: Path,
    *,
    checkpoint: str,
    split: SplitName | None,
    overrides: list[str],
    environment: Environment,
) -> list[str]:
    """Score a checkpoint and write its files; return a report, [] on other ranks than 0.

    checkpoint: best, last, or a step. split: None for the split on which the training evaluated.
    overrides: ``key=value`` for keys that a resumed run may change. Collective: every rank must
    call this.

    Raises:
        ConfigError, TransientError: the checkpoint, data or overrides cannot be used, or a file
        cannot be written.
    """
    trained = load_model(run_dir, checkpoint, overrides)
    is_other_folder = any(word.startswith("data.root=") for word in overrides)
    opened = prepare(
        lambda: choose_split(trained, split, is_other_folder=is_other_folder), environment
    )
    with process_group(environment, **trained.config.process_group) as world:
        named = opened(world)
        config = flatten_keys(to_builtins(trained.config))
        check_same(
            "config values, checkpoint or images",
            {"step": trained.step, "images": named.fingerprint, **config},
            world,
            fix="use the same command line, and the same files on every node",
        )
        if named.is_changed and world.is_main:
            logger.warning(
                "the images differ from those of the training (some were changed, added or"
                " removed), and are scored as they are now: to score the same images as then,"
                " restore them or set data.root"
            )
        set_torch_switches(world, compile_model=False, deterministic=trained.config.deterministic)
        return score(trained, named, world)


def score(trained: TrainedModel, split: NamedSplit, world: World) -> list[str]:
    """Score a model and write its files; return a report, [] on other ranks than 0. Collective."""
    config = trained.config
    bad_samples: list[tuple[str, str]] = []
    channels, height, width = trained.preprocessing.image_shape
    reader = build_reader(
        split.images,
        config.data,
        image_shape=(channels, height, width),
        num_classes=len(trained.class_names),
        world=world,
        bad=bad_samples,
    )
    began = time.perf_counter()
    rows = score_rows(trained, reader, world)
    rate = len(rows) / (time.perf_counter() - began)
    on_bad_image = config.data.on_bad_image
    BadSamples(
        bad_samples, world, are_skipped=on_bad_image is OnBadImage.skip, run_dir=trained.run_dir
    ).gather()

    def write() -> list[str]:
        if not world.is_main:
            return []
        scores = Scores(rows, trained.class_names)
        folder = trained.run_dir / FOLDER / f"{trained.checkpoint}-{split.name}"
        about = {
            "checkpoint": trained.checkpoint,
            "split": split.name,
            "data": config.data.description,
            "step": trained.step,
            "epoch": trained.epoch,
        }
        paths = partial(sample_name, split.images)
        write_evaluation(folder, scores, about, paths=paths, read=partial(read_images, reader))
        return [*describe(scores, about, rate=rate), f"wrote {folder}"]

    return world.raise_on_any_rank(write)


def describe(scores: Scores, about: dict[str, Any], *, rate: float) -> list[str]:
    """Return the scores, and the three classes with the lowest recall, as lines of text."""
    parts = [
        f"loss {scores.loss:.4f}",
        f"top-1 {scores.top1:.4f}",
        f"top-5 {scores.top5:.4f}",
        f"calibration error {scores.calibration_error():.4f}",
        f"{rate:,.0f} img/s",
    ]
    checkpoint = f"{about['checkpoint']} (epoch {about['epoch']}, step {about['step']})"
    recalls = {name: values["recall"] for name, values in scores.per_class().items()}
    known = sorted((recall, name) for name, recall in recalls.items() if recall is not None)
    return [
        f"{checkpoint} on {scores.count:,} {about['split']} images: {' · '.join(parts)}",
        f"lowest recall: {', '.join(f'{name} {recall:.4f}' for recall, name in known[:3])}",
    ]


def score_rows(trained: TrainedModel, reader: Reader, world: World) -> Tensor:
    """Return float64 [N, 6] for the samples, as from `SampleResults.gather`. Collective."""
    config = trained.config
    layout = memory_format(config.channels_last)
    preprocessing = trained.preprocessing
    normalize = Normalize(
        preprocessing.mean, preprocessing.std, device=world.device, memory_format=layout
    )
    loader = EvaluationLoader(reader, normalize, world, batch_size=config.eval_batch_size)
    model = trained.model.to(world.device).to(memory_format=layout)
    return evaluate(model, loader, world.device, autocast_dtype(config.precision)).gather(world)
