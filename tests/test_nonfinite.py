"""Weights and logits that are infinite or NaN: each command names them, and no file has them."""

import importlib
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from processes import Finished, launch, on_ranks, plugins, succeed
from runs import TINY, compose, in_process_group, newest_step, records

from ddp_trainer.checkpoint.file import DamagedCheckpointError, read_state, write_file
from ddp_trainer.config.errors import FAILURE, USER_ERROR
from ddp_trainer.training_run import run

VALUES = (math.nan, math.inf, -math.inf)
COMMANDS = ("evaluate", "export", "predict", "verify")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two epochs of a model with BatchNorm; return the run directory."""
    folder = tmp_path_factory.mktemp("finished")
    words = (*TINY, "model=timm", "model.arch=test_resnet")
    succeed(*words, f"output_dir={folder}", "name=run", cwd=folder)
    return folder / "run"


def spoil(run_dir: Path, place: str, value: float) -> None:
    """Set one number of `place` in the newest checkpoint, and in best.pt, to `value`."""
    for name in (f"step-{newest_step(run_dir):08d}.pt", "best.pt"):
        path = run_dir / "checkpoints" / name
        state = read_state(path)
        state["model"][place].view(-1)[0] = value
        write_file(path, state)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["optimizer.lr=1e30", "global_batch_size=96", "epochs=1"], 2),
        (["optimizer.lr=1e38", "global_batch_size=96", "epochs=1"], 1),
        (["optimizer.lr=1e30", "global_batch_size=96", "epochs=1", "on_nonfinite=skip"], 2),
        (["optimizer.lr=1e30", "checkpoint.every_steps=1", "log_every_steps=1"], 1),
        (["optimizer.lr=1e30", "ema.decay=0.5", "global_batch_size=96", "epochs=1"], 1),
    ],
    ids=str,
)
def test_a_training_that_ends_in_a_model_of_no_use_fails(
    words: list[str], ranks: int, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = [*TINY, f"output_dir={tmp_path}", "name=run", *words]
    done = launch(*command, ranks=ranks, cwd=tmp_path)
    assert done.code == 1, done.output
    assert "DivergedError: " in done.output
    assert " infinite or NaN: lower optimizer.lr" in done.output or " is not finite" in done.output
    assert re.search(
        r"to start anew with other values: .* resume=never$", done.output, re.MULTILINE
    )
    assert not (run_dir / "summary.json").exists()
    for path in (run_dir / "checkpoints").glob("*.pt"):
        state = read_state(path)  # which checks that all weights are finite
        assert state["step"] <= 1


def train_skipping(folder: Path, *words: str, label: int, ranks: int = 1) -> Finished:
    """Train with a loss that is infinite for samples with one label, or for all (label -1)."""
    return launch(
        *skipping(folder, label),
        *words,
        ranks=ranks,
        cwd=folder,
        **plugins("broken_parts", Path(__file__).parent),
    )


def skipping(folder: Path, label: int) -> tuple[str, ...]:
    return (
        *TINY,
        f"output_dir={folder}",
        "name=run",
        "on_nonfinite=skip",
        "loss=infinite",
        f"loss.label={label}",
    )


def train_with_broken_parts(jobs: list[tuple[str, ...]]) -> None:
    importlib.import_module("broken_parts")  # in this process only
    with in_process_group():
        for words in jobs:
            run(compose(*words))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("sync=parameter_server",),
        ("sync=fsdp",),
        ("precision=fp16",),
        ("sync=pipeline",),
    ],
    ids=str,
)
def test_skipped_updates_are_counted_in_parts_as_in_one_launch(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """With one rank in one launch, and with two ranks in three launches."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    alone = [word for word in words if word != "sync=pipeline"]  # which needs two ranks
    done = train_skipping(whole, "log_every_steps=3", *alone, label=3)
    assert done.code == 0, done.output
    common = (*skipping(parts, 3), "log_every_steps=1", *words)
    on_ranks(
        2,
        train_with_broken_parts,
        [(*common, *more) for more in (("max_steps=3",), ("max_steps=11",), ())],
    )

    tag = "optim/skipped_updates"
    summary = json.loads((whole / "run/summary.json").read_text())
    skipped = summary["skipped_updates"]
    assert 0 < skipped < summary["steps"] == 16
    assert json.loads((parts / "run/summary.json").read_text())["skipped_updates"] == skipped
    for folder in (whole, parts):
        assert sum(record[tag] for record in records(folder / "run", tag)) == skipped
    assert f" · {skipped} of 16 updates skipped on 1 × cpu" in done.output
    assert done.output.count("their gradients are not finite") == 1
    steps = {record["step"] for record in records(parts / "run", tag) if record[tag]}
    assert len(steps) == skipped


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("words", [(), ("max_steps=3",), ("sync=local_sgd",)], ids=str)
def test_an_epoch_without_an_update_ends_the_training(
    words: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    """Also if it was trained in two launches."""
    done = train_skipping(tmp_path, *words, label=-1, ranks=ranks)
    if "max_steps=3" in words:
        assert done.code == 0, done.output
        done = train_skipping(tmp_path, label=-1, ranks=ranks)
    assert done.code == 1, done.output
    assert (
        "DivergedError: all 8 updates of epoch 1 were skipped, because their gradients are not"
        " finite: lower optimizer.lr" in done.output
    )
    assert not (tmp_path / "run/checkpoints/step-00000008.pt").exists()


PLACES = ("conv1.0.weight", "conv1.1.running_var", "fc.bias")


@pytest.mark.parametrize(("place", "value"), [*itertools.product(PLACES, VALUES)])
def test_a_checkpoint_with_such_a_weight_is_damaged(
    place: str, value: float, finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    spoil(run_dir, place, value)
    with pytest.raises(DamagedCheckpointError, match=rf"infinite or NaN \({place}\)"):
        read_state(run_dir / "checkpoints/best.pt")


@pytest.mark.parametrize(("place", "value"), [*zip(PLACES, VALUES, strict=True)])
def test_a_checkpoint_with_such_a_weight_is_passed_over(
    place: str, value: float, finished: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    spoil(run_dir, place, value)
    for command in COMMANDS:
        images = [str(run_dir / "pictures")] if command == "predict" else []
        done = launch(command, str(run_dir), *images, cwd=tmp_path)
        assert done.code == (FAILURE if command == "verify" else USER_ERROR), done.output
        assert f"has a weight that is infinite or NaN ({place})" in done.output
        assert "Traceback" not in done.output


def test_logits_that_are_not_finite_are_named(finished: Path, tmp_path: Path) -> None:
    """All weights are finite, and their products are not."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    path = run_dir / "checkpoints/best.pt"
    state = read_state(path)
    state["model"]["fc.weight"].fill_(3e38)
    write_file(path, state)
    Image.new("L", (12, 12), 200).save(run_dir / "picture.png")
    for command in ("evaluate", "export", "predict"):
        images = [str(run_dir / "picture.png")] if command == "predict" else []
        done = launch(command, str(run_dir), *images, cwd=tmp_path)
        assert done.code == USER_ERROR, done.output
        assert "the logits of checkpoint=best are infinite or NaN" in done.output
