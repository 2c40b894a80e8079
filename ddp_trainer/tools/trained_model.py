"""A trained model from a checkpoint, with its config, its classes and its preprocessing."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from ddp_trainer.checkpoint.file import DamagedCheckpointError, State, read_state
from ddp_trainer.checkpoint.store import step_files
from ddp_trainer.config.composition import from_builtins
from ddp_trainer.config.errors import ConfigError, require
from ddp_trainer.config.keys import change_keys, free_keys
from ddp_trainer.config.run_dirs import check_links, require_run_dir
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
    "eval_split",
    "preprocessing",
    "data_fingerprint",
    "step",
    "epoch",
    "progress",
)


class TrainedModel(NamedTuple):
    """The model of a checkpoint. Its parameters are on the CPU, and it is in evaluation mode."""

    run_dir: Path
    checkpoint: str
    """best, last or a step; last if best was chosen and does not exist."""
    config: Config
    model: nn.Module
    class_names: list[str]
    eval_split: str
    """The name of the split on which the training evaluated: "validation" or "test"."""
    preprocessing: Preprocessing
    step: int
    epoch: int
    data_fingerprint: str
    evaluation: tuple[float | None, float, int]
    """Loss, top-1 and number of images of the last evaluation up to `step`; 0 images: none."""

    def check_finite(self, values: Tensor) -> None:
        """Raise ConfigError if one of `values`, which the model has computed, is not finite."""
        require(
            bool(values.isfinite().all()),
            f"{self.run_dir}: the logits of checkpoint={self.checkpoint} are infinite or NaN,"
            " though its weights are not: choose the checkpoint of an earlier step",
        )


def load_model(
    run_dir: Path, checkpoint: str = BEST, overrides: Sequence[str] = ()
) -> TrainedModel:
    """Return the model of a checkpoint in `run_dir`: best, last (the newest), or a step.

    overrides: ``key=value`` for keys that a resumed run may change, such as device and data.root.

    Raises:
        ConfigError: the checkpoint is missing, damaged or of another version, or an override is not
            valid.
        OmegaConfBaseException: an override has a value of another type.
    """
    require_run_dir(run_dir)
    check_links(run_dir)
    checkpoint = last_without_best(run_dir, checkpoint)
    path, state = read_checkpoint(run_dir, checkpoint)
    check_version(path, state)
    config = from_builtins(override(state["config"], overrides))
    shape = tuple(state["preprocessing"]["image_shape"])
    preprocessing = Preprocessing(**state["preprocessing"] | {"image_shape": shape})
    channels = (1, shape[0])
    require(
        len(preprocessing.mean) in channels
        and len(preprocessing.std) in channels
        and min(preprocessing.std) > 0,
        f"{path} has mean={preprocessing.mean} and std={preprocessing.std} for images of {shape[0]}"
        " channels: it is damaged, choose another checkpoint",
    )
    names = list(state["class_names"])
    try:
        model = build_model(
            replace(config.model, weights=None), image_shape=shape, num_classes=len(names)
        )
        load_state(model, state.get("ema") or state["model"])
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
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
        eval_split=state["eval_split"],
        preprocessing=preprocessing,
        step=state["step"],
        epoch=state["epoch"],
        data_fingerprint=state["data_fingerprint"],
        evaluation=tuple(state["progress"]["evaluation"]),
    )


def check_version(path: Path, state: State) -> None:
    """Raise ConfigError if this version of the package cannot read the state of a checkpoint."""
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


def override(config: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return `config` changed by `words`, ``key=value``.

    Raises:
        ConfigError: a key is not one that a resumed run may change.
    """
    changed = change_keys(config, words)
    for word in words:
        require(
            word.partition("=")[0] in free_keys(config),
            f"{word} would change what was trained: leave it out; keys such as data.root and device"
            " can be set",
        )
    return changed


def last_without_best(run_dir: Path, checkpoint: str) -> str:
    """Return "last" for "best" if only step checkpoints exist, else `checkpoint`."""
    choices = checkpoint_files(run_dir / "checkpoints")
    if checkpoint != BEST or BEST in choices or LAST not in choices:
        return checkpoint
    logger.warning("%s has no best.pt: using the newest checkpoint", run_dir)
    return LAST


def read_checkpoint(run_dir: Path, checkpoint: str) -> tuple[Path, State]:
    """Return path and state of a checkpoint: best, last (the newest good one), or a step.

    Raises:
        ConfigError: the checkpoint does not exist or is damaged; the message lists the others.
    """
    choices = checkpoint_files(run_dir / "checkpoints")
    reason = "does not exist"
    for path in choices.get(checkpoint, []):
        try:
            return path, read_state(path)
        except DamagedCheckpointError as error:
            reason = str(error)
            logger.warning("checkpoint %s %s", path, error)
    others = [name for name, paths in choices.items() if paths != choices.get(checkpoint)]
    fix = f"choose from {', '.join(others)}" if others else "the run has no other checkpoint yet"
    raise ConfigError(f"checkpoint={checkpoint} of {run_dir} {reason}: {fix}")


def checkpoint_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files to try, in order, for each name of a checkpoint: best, last, or a step."""
    paths = step_files(folder)
    files = {BEST: [folder / "best.pt"], LAST: paths}
    files |= {str(int(path.stem[5:])): [path] for path in paths}
    return {name: paths for name, paths in files.items() if any(path.is_file() for path in paths)}
