"""Runs with shards that are killed, and resumed on another number of ranks, again and again.

With TRIALS=full it takes half an hour, and has all numbers of ranks from 1 to 6 and ResNet-18.
"""

import random
from pathlib import Path

import pytest
from conftest import IS_FULL, trials
from runs import compose, kill_in_training, newest_step, read_summary, train_on
from sync.test_shards import curves

STEPS = trials(20, full=200)
KILLS = trials(3, full=10)
MODELS = {
    "lenet": ("model=lenet",),
    "dropout": ("model=torchvision", "model.arch=mobilenet_v3_small"),
}
if IS_FULL:
    MODELS["resnet18"] = ("model=resnet18", "data.height=16", "data.width=16")
WORDS = (
    "data=synthetic",
    "data.num_train=480",
    "data.num_eval=31",
    "data.height=32",
    "data.width=32",
    "data.augment.random_crop_padding=2",
    "data.augment.random_hflip=true",
    "global_batch_size=24",
    "shards=6",
    "precision=fp32",
    "num_threads=1",
    "epochs=10",
    f"max_steps={STEPS}",
    "ema.decay=0.9",
    "max_grad_norm=1",
    "log_every_steps=1",
    f"checkpoint.every_steps={max(2, STEPS // 20)}",
    "checkpoint.keep_last=2",
    "logger=[jsonl]",
)
SIZES = (1, 2, 3, 4, 5, 6) if IS_FULL else (1, 4)


@pytest.mark.timeout(3600)
@pytest.mark.fault("SIGKILL of a job, resumed on another number of ranks", times=KILLS)
@pytest.mark.parametrize("model", MODELS)
def test_one_hash_at_every_world_size_and_through_kills(model: str, tmp_path: Path) -> None:
    words = (*WORDS, *MODELS[model], f"output_dir={tmp_path}")
    for size in SIZES:
        train_on(size, *words, f"name={size}", deadline=900)

    chance = random.Random(model)
    config = compose(*words, "name=moved", "resume=auto")
    moved = tmp_path / "moved"
    for kill in range(KILLS):
        before = newest_step(moved)
        kill_in_training(chance.choice(SIZES), config, moved, after=chance.uniform(0, 0.2))
        assert before < newest_step(moved) < STEPS, f"kill {kill} was too late"
    train_on(3, *words, "name=moved", "resume=auto", deadline=900)

    runs = [tmp_path / str(size) for size in SIZES] + [moved]
    assert len({read_summary(run)["weights_sha256"] for run in runs}) == 1
    assert len({curves(run) for run in runs}) == 1
    assert read_summary(moved)["steps"] == STEPS
