"""A trained model from a checkpoint, with its config, its classes and its preprocessing."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from torch import nn

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, read_state
from ddp_trainer.config.composition import from_builtins
from ddp_trainer.config.errors import ConfigError, require, require_run_dir
from ddp_trainer.config.keys import change_keys, free_keys
from ddp_trainer.config.schema import Config
from ddp_trainer.models import build_model
from ddp_trainer.models.weights import load_state
from ddp_trainer.tools.preprocessing import Preprocessing

logger = logging.getLogger(__name__)

BEST = "best"
LAST = "last"
KEYS = (
    "model",
    "config",
    "class_names",
    "preprocessing",
    "data_fingerprint",
    "step",
    "epoch",
    "progress",
)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a checkpoint. Its parameters are on the CPU, and it is in evaluation mode."""

    run_dir: Path
    checkpoint: str
    """best, last or a step, as the caller has given it."""
    config: Config
    model: nn.Module
    class_names: list[str]
    preprocessing: Preprocessing
    step: int
    epoch: int
    data_fingerprint: str
    evaluation: tuple[float | None, float, int]
    """Loss, top-1 and number of images of the last evaluation before it; 0 images: none."""


def load_model(
    run_dir: Path, checkpoint: str = BEST, overrides: Iterable[str] = ()
) -> TrainedModel:
    """Return the model of a checkpoint in `run_dir`: best, last (the newest), or a step.

    overrides: ``key=value`` for keys that a resumed run may change, such as device and data.root.

    Raises:
        ConfigError: the checkpoint is missing, damaged or of another version, or an override is not
        valid.
    """
    require_run_dir(run_dir)
    path, state = read_checkpoint(run_dir, checkpoint)
    check_version(path, state)
    config = from_builtins(override(state["config"], overrides))
    preprocessing = Preprocessing(**state["preprocessing"])
    channels, height, width = preprocessing.image_shape
    names = list(state["class_names"])
    model = build_model(
        replace(config.model, weights=None),
        image_shape=(channels, height, width),
        num_classes=len(names),
    )
    try:
        load_state(model, state.get("ema") or state["model"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path} does not fit the installed code of model={config.model.name} ({reason}):"
            " install the version with which it was trained"
        ) from error
    return TrainedModel(
        run_dir=run_dir,
        checkpoint=checkpoint,
        config=config,
        model=model.eval(),
        class_names=names,
        preprocessing=preprocessing,
        step=state["step"],
        epoch=state["epoch"],
        data_fingerprint=state["data_fingerprint"],
        evaluation=tuple(state["progress"]["evaluation"]),
    )


def check_version(path: Path, state: State) -> None:
    """Raise ConfigError if another version of this package wrote a checkpoint."""
    other = f"{path} was written by another version of ddp_trainer"
    fix = "use the version that wrote it"
    missing = [key for key in KEYS if key not in state]
    require(not missing, f"{other} and lacks the entries {', '.join(missing)}: {fix}")
    try:
        from_builtins(state["config"])
    except (OmegaConfBaseException, KeyError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{other}, and this version cannot read its config ({reason}): {fix}"
        ) from error


def override(config: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Return `config` changed by `words`, ``key=value``; ConfigError for keys that are not free."""
    words = list(words)
    changed = change_keys(config, words)
    free = free_keys(config)
    for word in words:
        require(
            word.partition("=")[0] in free,
            f"{word} would change what was trained: leave it out; keys such as data.root and device"
            " can be set",
        )
    return changed


def read_checkpoint(run_dir: Path, checkpoint: str) -> tuple[Path, State]:
    """Return path and state of a checkpoint: best, last (the newest good one), or a step.

    Raises:
        ConfigError: the checkpoint does not exist or is damaged; the message lists the existing
        ones.
    """
    choices = checkpoint_files(run_dir / "checkpoints")
    reason = "does not exist"
    for path in choices.get(checkpoint, []):
        try:
            return path, read_state(path)
        except DamagedCheckpointError as error:
            reason = str(error)
            logger.warning("checkpoint %s %s", path, error)
    existing = f"choose from {', '.join(choices)}"
    fix = existing if choices else "the run has not saved a checkpoint yet"
    raise ConfigError(f"checkpoint={checkpoint} of {run_dir} {reason}: {fix}")


def checkpoint_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files to try, in order, by the name of a checkpoint: best, last, or a step."""
    paths = sorted(folder.glob(f"step-{8 * '[0-9]'}.pt"), reverse=True)
    files = {BEST: [folder / "best.pt"], LAST: paths}
    files |= {str(int(path.stem[5:])): [path] for path in paths}
    return {name: paths for name, paths in files.items() if paths and paths[0].exists()}
