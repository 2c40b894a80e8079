"""Score a trained model on a split with the code that evaluates during training."""

import logging
import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.data import SplitName
from ddp_trainer.config.differences import flatten_keys
from ddp_trainer.config.images import OnBadImage
from ddp_trainer.data.build import build_reader
from ddp_trainer.data.dataset import Split, sample_name
from ddp_trainer.data.loaders import EvaluationLoader, Reader, read_images
from ddp_trainer.distributed.environment import Environment
from ddp_trainer.distributed.process_group import prepare, process_group
from ddp_trainer.distributed.world import World
from ddp_trainer.output import OTHER_OUTPUT
from ddp_trainer.scores.files import write_evaluation
from ddp_trainer.scores.scores import Scores
from ddp_trainer.start import check_same, set_torch_switches
from ddp_trainer.tools.classifier import Classifier
from ddp_trainer.tools.splits import NamedSplit, choose_split
from ddp_trainer.tools.trained_model import TrainedModel, load_model
from ddp_trainer.training.bad_samples import BadSamples
from ddp_trainer.training.evaluation import LOSS, SampleResults, evaluate

logger = logging.getLogger(__name__)


def score_run(
    run_dir: Path,
    *,
    checkpoint: str,
    split: SplitName | None,
    output: Path,
    overrides: list[str],
    environment: Environment,
) -> list[str]:
    """Score a checkpoint and write the scores; return lines to print, [] except on rank 0.

    Collective: every rank must call this.

    checkpoint: best, last, or a step. split: None for the split on which the training evaluated.
    output: the folder in which the folder of the scores is written.
    overrides: ``key=value`` for keys that a resumed run may change.

    Raises:
        ConfigError, TransientError: the checkpoint, data or overrides cannot be used, or a file
        cannot be written.
    """
    trained = load_model(run_dir, checkpoint, overrides)
    is_other_folder = any(word.startswith(("data.root=", "data.file=")) for word in overrides)
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
        if named.is_other and not is_other_folder and world.is_main:
            logger.warning(
                "the images differ from those of the training (some were changed, added or"
                " removed), and are scored as they are now: to score the same images as then,"
                " restore them or set data.root"
            )
        set_torch_switches(world, compile_model=False, deterministic=trained.config.deterministic)
        return score(trained, named, world, output=output)


def score(trained: TrainedModel, split: NamedSplit, world: World, *, output: Path) -> list[str]:
    """Score a model and write the scores; return lines to print, [] except on rank 0. Collective.

    Raises:
        ConfigError, TransientError: on all ranks, if an image cannot be read or a file written.
    """
    config = trained.config
    bad_samples: list[tuple[str, str]] = []
    began = time.perf_counter()
    results, reader = evaluate_split(trained, split.images, world, bad=bad_samples)
    scores = Scores(results.gather(world), trained.class_names)
    rate = scores.count / (time.perf_counter() - began)
    are_skipped = config.data.on_bad_image is OnBadImage.skip
    BadSamples(bad_samples, world, are_skipped=are_skipped, folder=output).gather()
    about = {
        "checkpoint": trained.checkpoint,
        "split": split.name,
        "data": config.data.description,
        "step": trained.step,
        "epoch": trained.epoch,
    }
    # other images get a folder of their own, so that the scores of the training's images stay
    suffix = f"-{split.fingerprint[:8]}" if split.is_other else ""
    folder = output / f"{trained.checkpoint}-{split.name}{suffix}"
    paths = partial(sample_name, split.images)
    read = partial(read_images, reader)

    def write() -> list[str]:
        if not world.is_main:
            return []
        write_evaluation(folder, scores, about, paths=paths, read=read, fix=OTHER_OUTPUT)
        report = f"python -m ddp_trainer report {shlex.quote(str(trained.run_dir))}"
        wrote = f"wrote {folder}, with the worst mistakes in mistakes.json; next: {report}"
        return [describe(scores, about, rate=rate), wrote]

    return world.raise_on_any_rank(write)


def evaluate_split(
    trained: TrainedModel,
    split: Split,
    world: World,
    *,
    bad: list[tuple[str, str]],
    keeps_probabilities: bool = False,
) -> tuple[SampleResults, Reader]:
    """Return the predictions for this rank's samples of `split`, and their reader. Collective.

    bad: a list to which bad samples are added, see `SampleReader`.

    Raises:
        ConfigError: on all ranks, if a logit is infinite or NaN.
    """
    config = trained.config
    reader = build_reader(
        split,
        config=config.data,
        image_shape=trained.preprocessing.image_shape,
        num_classes=len(trained.class_names),
        world=world,
        bad=bad,
    )
    classifier = Classifier(trained, world.device)
    loader = EvaluationLoader(
        reader, classifier.normalize, world, batch_size=config.eval_batch_size
    )
    results = evaluate(
        classifier.model,
        loader,
        world.device,
        classifier.autocast_dtype,
        keeps_probabilities=keeps_probabilities,
    )
    trained.check_finite(results.gather(world)[:, LOSS])
    return results, reader


def describe(scores: Scores, about: dict[str, Any], *, rate: float) -> str:
    """Return the scores as a line of text."""
    root = about["data"]["root"]
    source = f" of {root}" if root else ""
    has_top5 = len(scores.class_names) > 5  # else it is 1
    top5 = f" · top-5 {scores.top5:.4f}" if has_top5 else ""
    return (
        f"{about['checkpoint']} (epoch {about['epoch']}, step {about['step']}) on"
        f" {scores.count:,} {about['split']} images{source}: loss {scores.loss:.4f} · top-1"
        f" {scores.top1:.4f}{top5} · calibration error {scores.calibration_error():.4f} ·"
        f" {rate:,.0f} img/s"
    )
